"""The metadata of a GGUF file, and which of its keys nobody asked for: each is used, harmless, or refused."""

import re
from typing import Any

from ...errors import BuildError
from .file import GgufFile

# What changes no token and no logit, and why. Keys outside `general.`, the architecture's name, `tokenizer.`, `split.`
# and `adapter.` are their writer's own: llama.cpp reads none of them.
HARMLESS = (
    r"general\..*",  # names, licences, languages, the type of most tensors
    r"split\..*",  # checked when the parts are joined
    r"(?!tokenizer\.|adapter\.|ARCH\.).*",  # the quantiser's and the publisher's notes
    r"tokenizer\.huggingface\.json",  # the tokenizer again
    r"tokenizer\.chat_templates",  # the names of those that follow
    r"tokenizer\.ggml\.(seperator|mask|cls)_token_id",  # BERT's
    r"tokenizer\.ggml\.(prefix|suffix|middle|fim_pre|fim_suf|fim_mid)_token_id",  # a caller writes them
    r"tokenizer\.ggml\.token_type_count",  # for BERT's segments
    r"tokenizer\.ggml\.add_sep_token",  # for BERT's pairs of texts
    r"tokenizer\.ggml\.remove_extra_whitespaces",  # of unigram tokenizers, which are refused
    r"ARCH\.vocab_size",  # the embedding says it
    r"ARCH\.tensor_data_layout",  # a remark; what it says is true of every file
    r"ARCH\.rope\.scaling\.finetuned",  # a remark on how the model was trained; false is used or refused
    r"ARCH\.(n_deepstack_layers|deepstack_mapping)",  # of images
    r"ARCH\.attention\.causal",  # false is refused
    r"ARCH\.nextn_predict_layers",  # of a drafter in the file
)


class Metadata:
    """The keys of a file, and which of them were asked for."""

    def __init__(self, file: GgufFile, name: str):
        self.values, self.name = file.metadata, name
        self.used: set[str] = {"general.architecture", "general.alignment"}
        self.architecture = str(self.values.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key that begins with `general.` or `tokenizer.`, else with the architecture's name."""
        whole = key if key.startswith(("general.", "tokenizer.")) else f"{self.architecture}.{key}"
        self.used.add(whole)
        return self.values.get(whole, default)

    def need(self, key: str) -> Any:
        """The same for a key that must be there. Raises BuildError."""
        value = self.get(key)
        if value is None:
            raise BuildError(f"model: {self.name}: expected the key {self.architecture}.{key}, got none")
        return value

    def same(self, key: str, default: Any = None) -> Any:
        """The value of a key that may have one for each layer, where all are equal, but for 0 of layers that have none
        of what it says. Raises BuildError where not."""
        value = self.get(key, default)
        if isinstance(value, list):
            known = {each for each in value if each != 0}
            if len(known) != 1:
                raise BuildError(f"model: {self.name}: {key}: expected one value for all layers, got {value[:8]}")
            return known.pop()
        return value

    def check_all_used(self) -> None:
        """Refuse a file with a key that nobody asked for, unless it is harmless. Raises BuildError."""
        if self.get("attention.causal", True) is False:
            raise BuildError(f"model: {self.name}: attention.causal: expected true, got false: it is no causal model")
        switch = f"{self.architecture}.rope.scaling.finetuned"  # Granite's, for a model without positions
        if switch not in self.used and self.values.get(switch, True) is False:
            raise BuildError(f"model: {self.name}: rope.scaling.finetuned: expected true, got false")
        own = re.escape(self.architecture)
        harmless = re.compile("|".join(HARMLESS).replace("ARCH", own))
        odd = [key for key in self.values if key not in self.used and not harmless.fullmatch(key)]
        if odd:
            more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
            said = ", ".join(f"{key} = {str(self.values[key])[:40]}" for key in odd[:3])
            raise BuildError(f"model: {self.name}: expected keys whose meaning is known, got {said}{more}")
