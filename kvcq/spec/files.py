"""Records of the files and tensors that an artifact lists."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from kvcq.spec.base import SpecModel

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
FILE_NAME = r"^[a-z0-9][a-z0-9_-]{0,63}(\.[a-z0-9]{1,16}){1,2}$|^README\.md$"
TENSOR_NAME = r"^[A-Za-z0-9_]{1,64}(\.[A-Za-z0-9_]{1,64}){0,15}$"

FileName = Annotated[str, StringConstraints(pattern=FILE_NAME)]
TensorName = Annotated[str, StringConstraints(pattern=TENSOR_NAME)]


class FileEntry(SpecModel):
    """One file of an artifact: plain name, size in bytes, SHA-256 of its content."""

    name: FileName
    size: int = Field(ge=0)
    sha256: Sha256


class TensorEntry(SpecModel):
    """One tensor: full name ``layers.<id>.<role>``, role, shape and safetensors dtype (F32, F16, I8 ...)."""

    name: TensorName
    role: TensorName
    shape: tuple[int, ...]
    dtype: str
