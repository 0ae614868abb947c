"""OpenVINO GenAI, which reads GGUF files, plain and with prompt lookup."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

import numpy as np
from specstep.progress import OnProgress

from .engines import Answer, Contender, Settings, Skip

INSTALL = "make peers, or: pip install openvino-genai"


def version() -> str:
    """The package's. Raises Skip."""
    try:
        return installed_version("openvino-genai")
    except PackageNotFoundError:
        raise Skip(f"OpenVINO GenAI is not installed: {INSTALL}") from None


def prepare(contender: Contender, settings: Settings, progress: OnProgress) -> Path:
    """The model as a GGUF file. Raises Skip."""
    from .gguf_file import converted  # and with it transformers, which its process does without

    return converted(contender.weights, settings, progress)


class Runner:
    """A pipeline over token ids."""

    def __init__(self, contender: Contender, path: Path, settings: Settings):
        import openvino_genai as genai

        self.genai = genai
        options = {"prompt_lookup": True} if contender.options else {}
        self.pipeline = genai.LLMPipeline(str(path), "CPU", INFERENCE_NUM_THREADS=settings.threads, **options)
        self.config = genai.GenerationConfig()
        self.config.do_sample = False
        self.config.apply_chat_template = False  # the prompt is rendered
        self.config.eos_token_id, self.config.stop_token_ids = settings.stop_ids[0], set(settings.stop_ids)
        if contender.options:
            self.config.num_assistant_tokens = contender.options["tokens"]
            self.config.max_ngram_size = contender.options["ngram"]

    def answer(self, prompt: list[int], new_tokens: int) -> Answer:
        """One prompt, timed by the pipeline itself: its pass ends with the first token."""
        from openvino import Tensor

        ids = np.array([prompt], dtype=np.int64)
        self.config.max_new_tokens = new_tokens
        result = self.pipeline.generate(self.genai.TokenizedInputs(Tensor(ids), Tensor(np.ones_like(ids))), self.config)
        tokens, measured = list(result.tokens[0]), result.perf_metrics
        first, whole = measured.get_ttft().mean / 1e3, measured.get_generate_duration().mean / 1e3
        return Answer(tokens, first, whole - first, len(tokens) - 1)

    def close(self) -> None:
        """Nothing to give back but the process."""
