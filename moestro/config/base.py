"""The rules every config section shares: frozen, no unknown keys, plain data."""

from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A frozen group of settings. Unknown keys and wrong types are errors, never ignored; "none" unsets a value."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, bool) and not (isinstance(value, str) and value == "none"):
            return value  # nearly always; public records are many thousand samples of twelve fields
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = (annotation, *get_args(annotation))
        if isinstance(value, str) and value == "none" and NoneType in kinds:
            return None
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise PydanticCustomError("bool_as_number", "Input should be a number, not true or false")
        return value
