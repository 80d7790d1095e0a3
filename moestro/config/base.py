"""The rules every config section shares: frozen, no unknown keys, plain data."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of settings. Unknown keys and wrong types are errors, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())
