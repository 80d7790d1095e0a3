"""What tests of counted steps look at, and the small models that they count."""

from moestro.config import ModelConfig, load_config
from moestro.config.plan import Plan, Workload
from moestro.graph.convert import workload_of
from moestro.graph.words import Collective, Kernel, StepGraph


def of_preset(name: str) -> Workload:
    workload = workload_of(load_config(name).config)
    return workload.model_copy(update={"global_batch_size": 1})


def flops(graph: StepGraph, part: str | None = None) -> float:
    """Of one rank of each stage, with attention's backward as twice its forward, as FLOPs of models are counted."""
    total = 0.0
    for node, times in graph.nodes():
        # The sums that make gradients of biases are no part of what a model is said to take.
        if isinstance(node, Kernel) and node.name == "bias wgrad":
            continue
        if isinstance(node, Kernel) and node.part != "optimizer" and part in (None, node.part):
            total += node.flops * times * (0.8 if node.op == "attention_backward" else 1.0)
    return total


def total_parameters(graph: StepGraph, plan: Plan) -> int:
    """Over the ranks that hold different parts."""
    found = 0
    for stage in graph.stages:
        parameters = stage.parameters
        found += (parameters.dense - parameters.replicated) * plan.tp + parameters.replicated
        found += parameters.expert * plan.ep * plan.etp
    return found


def twice_held(model: ModelConfig, plan: Plan) -> int:
    """The embedding, which the last stage of a pipeline has again."""
    assert model.vocab_size is not None
    return model.vocab_size * model.hidden_size * (plan.pp > 1 and (model.tie_embeddings or model.mtp is not None))


def volumes(graph: StepGraph, dimension: str) -> dict[str, float]:
    """Bytes by operation and direction, of the first stage in one micro-batch."""
    found: dict[str, float] = {}
    stage = graph.stages[0]
    for way, nodes in (("forward", stage.forward), ("backward", (*stage.backward, *stage.recompute))):
        for node in nodes:
            if isinstance(node, Collective) and node.dimension == dimension:
                key = f"{way} {node.op}"
                found[key] = found.get(key, 0.0) + node.bytes * node.times
    return found


DENSE = ModelConfig(vocab_size=512, hidden_size=64, num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=96)


def mixture(**moe: object) -> ModelConfig:
    values = {"num_experts": 16, "top_k": 4, "expert_hidden_size": 32} | moe
    return ModelConfig.model_validate(DENSE.model_dump() | {"moe": values})
