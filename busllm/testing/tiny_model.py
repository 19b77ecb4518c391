"""Tiny random models on disk, in the layout of a published checkpoint.

Owns: random weights for the configurations of `tiny_architectures.py`, and a byte-level tokenizer that goes with all
of them.
Does not know: the engine; a model is only files here, so the same one can be read by other libraries and compared.

Weights have a standard deviation of 0.15. At the usual 0.02 a tiny model hardly looks at its context: a wrong rotation
or a lost key would leave almost every most likely token as it was, and a test would see nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from busllm.testing.tiny_architectures import HOOKED, OWN, REFUSED, SHAPE, STANDARD_DEVIATION

TINY_ARCHITECTURES = tuple(OWN)
_ARCHITECTURES = {**OWN, **HOOKED, **REFUSED}

_EOS, _START, _END = "<|eos|>", "<|start|>", "<|end|>"


def write_tiny_model(directory: Path, architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Writes config, weights, tokenizer and chat template.

    Args:
        directory: made if missing.
        architecture: a name in `tiny_architectures.py`.
        seed: of the random weights.
        overrides: values of the configuration.

    Returns:
        The directory.
    """
    import torch  # here: tests that need only the tokenizer stay light

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _random_model(architecture, overrides).float()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # made as zeros, which would hide a lost bias
                torch.nn.init.normal_(parameter, std=STANDARD_DEVIATION)
            elif "norm" in name:  # made as ones, which would hide a lost or swapped norm
                torch.nn.init.normal_(parameter, mean=1.0, std=STANDARD_DEVIATION)
    model.generation_config.eos_token_id = [256, 258]
    model.save_pretrained(directory)
    write_tiny_tokenizer(directory)
    return directory


def write_tiny_tokenizer(directory: Path) -> None:
    """Writes a tokenizer whose ids 0 … 255 are bytes, and a chat template."""
    alphabet = _byte_characters()
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_EOS, _START, _END])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    template = (
        "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    (directory / "chat_template.jinja").write_text(template)


def _random_model(architecture: str, overrides: dict[str, Any]) -> Any:
    import transformers

    if architecture not in _ARCHITECTURES:
        raise ValueError(f"{architecture!r} is none of {', '.join(_ARCHITECTURES)}")
    tiny = _ARCHITECTURES[architecture]
    model = getattr(transformers, tiny.model)
    return model(model.config_class(**{**SHAPE, **tiny.settings, **overrides}))


def _byte_characters() -> list[str]:
    """The printable character by which a byte-level tokenizer writes each byte, by byte value (as GPT-2 did)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    characters = {value: chr(value) for value in printable}
    characters |= {value: chr(256 + index) for index, value in enumerate(others)}
    return [characters[value] for value in range(256)]
