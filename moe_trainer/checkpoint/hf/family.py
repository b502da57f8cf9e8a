"""A family of Hugging Face models: how its config.json and its tensors correspond to flags and native tensors.

Families are read from mapping files (mapping_file.py). Flags are by destination.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_trainer.checkpoint.hf.converters.converter import ConfigConverter
from moe_trainer.checkpoint.hf.rules import Names

NEEDED = "(needed)"


@dataclass(frozen=True)
class Key:
    """A key of config.json and its flag; `default` if the key is missing."""

    name: str
    dest: str
    default: Any = NEEDED


@dataclass(frozen=True)
class TextPart:
    """The language model inside a model that also reads images or sound.

    Attributes:
        prefix: of its tensors; `own_prefix` is theirs in a language model alone.
        others: prefixes of all other tensors.
        config: path to its table in config.json.
        defaults: values that transformers uses for keys that this table lacks, if they differ from the family's.
    """

    prefix: str
    own_prefix: str
    others: tuple[str, ...]
    config: tuple[str, ...]
    defaults: Mapping[str, Any]

    def read(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return its config.json, from that of the whole model; None if that has no such table."""
        table, tied = config, {}
        for key in self.config:
            if "tie_word_embeddings" in table:  # the table around it decides
                tied = {"tie_word_embeddings": table["tie_word_embeddings"]}
            table = table.get(key, 0)
            if not isinstance(table, Mapping):
                return None
        return {**self.defaults, **table, **tied}

    def rename(self, name: str) -> str | None:
        """Return the name that the tensor has in a language model alone; None if it is not of it."""
        if name.startswith(self.others):
            return None
        return self.own_prefix + name.removeprefix(self.prefix) if name.startswith(self.prefix) else name


@dataclass(frozen=True)
class Family:
    """A model type.

    Attributes:
        fixed_flags: flags that always hold.
        required_values: accepted values of keys of config.json, if present; the first one is written.
        ignored: further keys without influence on the function of the model.
        defaults: values that transformers uses for missing keys, if they differ from those of the key or its converter.
        names: rules of its tensors.
        class_prefix: of its classes in transformers; "" for the name in their spelling.
        other_names: model types that are read as this one.
        renamed: keys of its config.json, with the names that other families and the converters have for them.
        text_parts: by model type, those that contain this one.
    """

    name: str
    keys: tuple[Key, ...]
    converters: tuple[ConfigConverter, ...]
    fixed_flags: Mapping[str, Any]
    required_values: Mapping[str, tuple[Any, ...]]
    ignored: tuple[str, ...]
    defaults: Mapping[str, Any]
    names: Names
    class_prefix: str
    other_names: tuple[str, ...]
    text_parts: Mapping[str, TextPart]
    renamed: Mapping[str, str]

    @property
    def architecture(self) -> str:
        """Name of the class in transformers: Qwen3MoeForCausalLM of qwen3_moe."""
        return f"{self._prefix}ForCausalLM"

    @property
    def _prefix(self) -> str:
        return self.class_prefix or "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def code_files(self) -> tuple[Path, ...]:
        """Files of remote_code/ with classes that transformers lacks, empty for most families.

        They are exported with the weights, so that transformers builds the model with trust_remote_code=True.
        """
        return tuple(sorted(Path(__file__).with_name("remote_code").glob(f"*_{self.name}.py")))

    @property
    def auto_map(self) -> dict[str, dict[str, str]]:
        """The key of config.json that names the classes in `code_files`; nothing without them."""
        if not self.code_files:
            return {}
        configuration = f"configuration_{self.name}.{self._prefix}Config"
        return {
            "auto_map": {
                "AutoConfig": configuration,
                "AutoModelForCausalLM": f"modeling_{self.name}.{self.architecture}",
            }
        }

    @property
    def model_types(self) -> tuple[str, ...]:
        """Values of "model_type" in config.json that this family reads."""
        return (self.name, *self.other_names, *self.text_parts)
