"""Where metrics go besides metrics.jsonl: TensorBoard files, Weights & Biases, MLflow."""

from pathlib import Path
from typing import Any

from moestro.config import Config
from moestro.errors import MoestroError


class Trackers:
    """Sends scalar metrics to every tracker named in run.trackers, from the main rank of several.

    wandb and mlflow are imported only when named.
    """

    def __init__(self, config: Config, folder: Path, main: bool = True) -> None:
        self._board: Any = None
        self._wandb: Any = None
        self._mlflow: Any = None
        for name in config.run.trackers if main else ():
            if name == "tensorboard":
                from tensorboardX import SummaryWriter

                self._board = SummaryWriter(str(folder / "tensorboard"))
            elif name == "wandb":
                wandb = _import("wandb")
                settings = config.model_dump(mode="json")
                self._wandb = wandb.init(project="moestro", name=config.run.name, dir=str(folder), config=settings)
            elif name == "mlflow":
                self._mlflow = _import("mlflow")
                self._mlflow.start_run(run_name=config.run.name)

    def log(self, scalars: dict[str, float], step: int) -> None:
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)
        if self._mlflow is not None:
            self._mlflow.log_metrics({name.replace("/", "."): v for name, v in scalars.items()}, step=step)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._mlflow is not None:
            self._mlflow.end_run()


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MoestroError(f"run.trackers names {name}, which is not installed: pip install {name}") from error


def check_trackers(config: Config) -> None:
    """Raise MoestroError for a tracker that is not installed, before a run is begun."""
    for name in config.run.trackers:
        if name != "tensorboard":
            _import(name)
