"""Formats of single layers (--te-precision-config-file), as Megatron-LM's file describes them.

    configs:
      mxfp8:
        transformer_engine_config_type: "TEQuantizationParams"
        training_recipe: {fp8_quantization_recipe: "mxfp8"}
        evaluation_recipe: {}
    matchers:
      fc2:
        {type: "glob", pattern: "*.linear_fc2", config: "mxfp8", enabled: true}

The first enabled matcher whose pattern fits the name of a linear chooses its config; without one the linear has the
recipe of the flags. An empty recipe is high precision. Without `evaluation_recipe` evaluation computes as training
does. Layers that the flags keep in high precision (--first-last-layers-bf16) stay there. Names are those of
checkpoints, decoder.layers.7.mlp.experts.linear_fc1: layers count over all pipeline stages, and all experts of a layer
share a name.

Not run here, and refused: delayed scaling and custom quantizers in the file, quantizing what the flags do not, and
evaluation in fewer bits than training.
"""

import fnmatch
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from arguments.mechanisms.formats import FLAGS, NAMED_BY_LAYER
from arguments.regular_file import regular_file
from moe_trainer.errors import UserError
from moe_trainer.quantization.recipe import QuantizationRecipe, make_recipe

logger = logging.getLogger(__name__)

FLAG = "--te-precision-config-file"
KIND = "TEQuantizationParams"
NAMES = MappingProxyType(
    {flags.in_precision_file: tuple(each.key for each in NAMED_BY_LAYER if each.flags is flags) for flags in FLAGS}
)
_RECIPE_KEYS = frozenset((*NAMES, "fp8_format", "override_quantized_autocast", "override_nonquantized_autocast"))
_CONFIG_KEYS = frozenset(("transformer_engine_config_type", "training_recipe", "evaluation_recipe"))


class PrecisionFileError(UserError):
    """The file is invalid, or asks for something that is not supported."""


@dataclass(frozen=True)
class Formats:
    """Recipes of one linear in training and evaluation; None for high precision."""

    training: QuantizationRecipe | None
    evaluation: QuantizationRecipe | None


class PrecisionFile:
    """Contents of a precision file.

    Args:
        configs: by name; None for the recipe of the flags.
        matchers: pattern and config name, in order.
    """

    def __init__(self, configs: Mapping[str, Formats | None], matchers: list[tuple[str, str]]):
        self._configs, self._matchers = configs, matchers
        self._logged: set[str] = set()

    @staticmethod
    def load(path: str, default: QuantizationRecipe) -> "PrecisionFile":
        """Read a file.

        Args:
            default: the recipe of the flags, whose `wgrad` applies to all.

        Raises:
            PrecisionFileError: if the file is invalid.
        """
        import yaml

        try:
            root = yaml.safe_load(regular_file(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise PrecisionFileError(f"{FLAG} {path}: {' '.join(str(error).split())}") from None
        found = _Reader(path, default)
        root = found.table(root, "the file", ("configs", "matchers"))
        configs = {
            str(name): found.config(body, f"config {name!r}")
            for name, body in found.table(root.get("configs"), "configs").items()
        }
        bodies = found.table(root.get("matchers"), "matchers")
        matchers = [found.matcher(body, f"matcher {name!r}", configs) for name, body in bodies.items()]
        return PrecisionFile(configs, [matcher for matcher in matchers if matcher is not None])

    def formats(self, name: str, default: QuantizationRecipe) -> Formats:
        """Return the recipes of a linear by its name; `default` is the recipe of the flags."""
        config = next((config for pattern, config in self._matchers if fnmatch.fnmatchcase(name, pattern)), None)
        found = None if config is None else self._configs[config]
        if config is not None and config not in self._logged:
            self._logged.add(config)
            logger.info("%s: %s is the first linear with config %r", FLAG, name, config)
        return Formats(default, default) if found is None else found


class _Reader:
    """Parser of a file whose errors name the file and the part."""

    def __init__(self, path: str, default: QuantizationRecipe):
        self._path, self._default = path, default

    def refuse(self, what: str) -> PrecisionFileError:
        return PrecisionFileError(f"{FLAG} {self._path}: {what}")

    def table(self, body: object, where: str, keys: Collection[str] | None = None) -> dict:
        body = {} if body is None else body
        if not isinstance(body, dict):
            raise self.refuse(f"{where} is no table")
        if keys is not None and (unknown := sorted(str(key) for key in body if key not in keys)):
            raise self.refuse(f"{where}: {', '.join(unknown)} is not known; it can have {', '.join(sorted(keys))}")
        return body

    def config(self, body: object, where: str) -> Formats | None:
        body = self.table(body, where, _CONFIG_KEYS)
        if body.get("transformer_engine_config_type") != KIND:
            raise self.refuse(f"{where} needs transformer_engine_config_type: {KIND}")
        if "training_recipe" not in body:
            raise self.refuse(f"{where} needs a training_recipe ({{}} for high precision)")
        training, overrides = self._recipe(body["training_recipe"], f"{where}, training_recipe")
        evaluation, also = training, overrides
        if body.get("evaluation_recipe") is not None:
            evaluation, also = self._recipe(body["evaluation_recipe"], f"{where}, evaluation_recipe")
        if overrides != also:
            raise self.refuse(f"{where}: override_quantized_autocast must be the same in training and in evaluation")
        if training is None and evaluation is not None:
            raise self.refuse(f"{where}: evaluation in fewer bits than training is not run by this version")
        return Formats(training, evaluation) if overrides else None

    def _recipe(self, body: object, where: str) -> tuple[QuantizationRecipe | None, bool]:
        """Return the recipe, and whether it overrides that of the flags."""
        body = self.table(body, where, _RECIPE_KEYS)
        if body.get("override_nonquantized_autocast"):
            raise self.refuse(
                f"{where}: override_nonquantized_autocast is not run by this version: what the flags keep in high "
                "precision stays so"
            )
        overrides = body.get("override_quantized_autocast", True)
        if overrides not in (True, False):
            raise self.refuse(f"{where}: override_quantized_autocast must be true or false")
        named = {key: body[key] for key in NAMES if body.get(key) is not None}
        if len(named) > 1:
            raise self.refuse(f"{where}: one of {' and '.join(NAMES)}")
        for key, name in named.items():
            if name not in NAMES[key]:
                raise self.refuse(f"{where}: {key} {name} is not run by this version; choose {', '.join(NAMES[key])}")
            hybrid = body.get("fp8_format", "e4m3")
            if hybrid not in ("e4m3", "hybrid"):
                raise self.refuse(f"{where}: fp8_format must be e4m3 or hybrid")
            return make_recipe(name, hybrid=hybrid == "hybrid", wgrad=self._default.wgrad), overrides
        return None, overrides

    def matcher(self, body: object, where: str, configs: Mapping[str, object]) -> tuple[str, str] | None:
        body = self.table(body, where, ("config", "type", "pattern", "enabled"))
        if not body.get("enabled", False):
            return None
        if body.get("type") != "glob":
            raise self.refuse(f"{where} needs type: glob")
        for key in ("pattern", "config"):
            if not isinstance(body.get(key), str):
                raise self.refuse(f"{where} needs {key}")
        if body["config"] not in configs:
            raise self.refuse(f"{where}: there is no config {body['config']!r}")
        return body["pattern"], body["config"]
