"""The default model in the files that other servers read.

Owns: a Hugging Face folder in bfloat16, made through busllm's own weight source, and a GGUF whose 4-bit weights are in
Q4_0, llama.cpp's fastest format. Both are made once and kept.
Does not know: who reads them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from busllm.errors import ModelError
from busllm.model_store.files import CONFIG, ModelFiles, read_json
from busllm.model_store.resolve import resolve
from busllm.model_store.weights import iter_tensors

_BLOCKS_OF_4_BITS = "Q4_"
_WRITTEN_BY_THE_WRITER = ("general.architecture", "general.file_type")


class PeerModel(msgspec.Struct, frozen=True):
    """A model that is on this machine, in every form.

    Attributes:
        source: as a topology file names it.
        files: as busllm keeps it.
        folder: where the other forms are kept.
    """

    source: str
    files: ModelFiles
    folder: Path

    @classmethod
    def of(cls, source: str, cache: Path) -> PeerModel:
        """Finds a model.

        Args:
            cache: folder for the other forms of all models.

        Raises:
            ModelError: it is not on this machine.
        """
        files = resolve(source)
        return cls(source, files, cache / files.name.replace("/", "--"))

    def hugging_face_folder(self) -> Path:
        """A folder with `config.json`, the tokenizer and bfloat16 safetensors."""
        return _made_once(self.folder / "bfloat16", self._write_hugging_face)

    def q4_0_file(self) -> Path:
        """A GGUF file with its 4-bit weights in Q4_0.

        Raises:
            ModelError: the model is no GGUF.
        """
        return _made_once(self.folder / "q4_0", self._write_q4_0) / "model.gguf"

    def _write_hugging_face(self, folder: Path) -> None:
        if self.files.directory is None or self.files.config is None:
            raise ModelError(f"{self.source!r} has no weights that another server could read.")
        for path in self.files.directory.iterdir():
            if path.suffix in (".json", ".jinja") and not path.name.endswith("index.json"):
                shutil.copyfile(path, folder / path.name)
        config = read_json(self.files.config) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        tensors = {
            name: torch.tensor(tensor.to_float32()).to(torch.bfloat16) for name, tensor in iter_tensors(self.files)
        }
        if config.get("tie_word_embeddings"):
            tensors.pop("lm_head.weight", None)  # it is the embedding, which is there
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def _write_q4_0(self, folder: Path) -> None:
        if self.files.gguf is None:
            raise ModelError(f"{self.source!r} is no GGUF; llama.cpp reads nothing else.")
        reader = gguf.GGUFReader(self.files.gguf)
        writer = gguf.GGUFWriter(folder / "model.gguf", reader.fields[_WRITTEN_BY_THE_WRITER[0]].contents())
        _copy_metadata(reader, writer)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
        for tensor in reader.tensors:
            _copy_tensor(tensor, writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _WRITTEN_BY_THE_WRITER:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)


def _copy_tensor(tensor: gguf.ReaderTensor, writer: gguf.GGUFWriter) -> None:
    if tensor.tensor_type.name.startswith(_BLOCKS_OF_4_BITS):
        q4_0 = gguf.GGMLQuantizationType.Q4_0
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, gguf.quantize(values, q4_0), raw_dtype=q4_0)
    else:
        # A copy: the reader maps its file.
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)


def _made_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Makes a folder in one step, so that an interrupted run leaves none that is incomplete."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as unfinished:
            made = Path(unfinished) / folder.name
            made.mkdir()
            write(made)
            made.rename(folder)
    return folder
