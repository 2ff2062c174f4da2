"""A trained model as lm-evaluation-harness asks for it: likelihoods, and text until a stop.

The harness's own class for Hugging Face models reads log-likelihoods off one forward pass, which is
right for autoregressive models alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data_tools.tokenizers import TextTokenizer
from models.decoding import Sampling
from models.families import family_of
from models.likelihood import Request, Scoring, likelihoods
from models.samplers import continued
from models.transformer import Transformer

from .objective_likelihood import whole_likelihoods
from .trained import TrainedModel


def harness() -> Any:
    """The package.  ``ValueError`` where it is not installed."""
    try:
        return importlib.import_module("lm_eval")
    except ImportError as error:
        raise ValueError(
            f'lm_eval cannot be used here ({error}): pip install -e ".[eval]"'
        ) from None


def run_tasks(
    scorer: TextScorer, tasks: Sequence[str], folder: str | None = None, **options: Any
) -> dict[str, dict[str, float]]:
    """Task -> figure -> value, under the harness's names.  ``folder`` holds tasks of one's own;
    ``options`` go to the harness's ``simple_evaluate``."""
    manager_of = importlib.import_module("lm_eval.tasks").TaskManager
    manager, unknown = None, list(tasks)
    if folder is not None:  # the harness's own tasks are thousands of files: a minute to read
        manager = manager_of(include_path=folder, include_defaults=False)
        unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        manager = manager_of(include_path=folder)
        unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        raise ValueError(f"the harness knows no task {', '.join(unknown)}")
    found = harness().simple_evaluate(
        model=language_model(scorer), tasks=list(tasks), task_manager=manager, **options
    )
    return {
        task: {name: value for name, value in figures.items() if type(value) in (int, float)}
        for task, figures in found["results"].items()
    }


def language_model(scorer: TextScorer) -> Any:
    """``scorer`` as the ``LM`` of the harness, to be given to its ``simple_evaluate``."""
    harness()
    base = importlib.import_module("lm_eval.api.model").LM
    asked: dict[str, Any] = {
        "loglikelihood": lambda self, requests: scorer.continuations([r.args for r in requests]),
        "loglikelihood_rolling": lambda self, requests: scorer.texts([r.args[0] for r in requests]),
        "generate_until": lambda self, requests: [scorer.until(*r.args) for r in requests],
    }
    return type("Midspan", (base,), asked)()


def is_causal(trained: TrainedModel) -> bool:
    return family_of(trained.objective) == "causal"


@dataclass
class TextScorer:
    """What the harness asks for; it needs no harness itself.

    truncate: leave out the beginning of a context that is too long; such a request is an error
    otherwise, as is one whose continuation alone is too long.
    """

    trained: TrainedModel
    model: Transformer
    words: TextTokenizer
    scoring: Scoring
    truncate: bool = False

    @property
    def causal(self) -> bool:
        return is_causal(self.trained)

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(nats, whether it is the greedy one) of each continuation of its context."""
        return self._score([self.request(*pair) for pair in pairs])

    def texts(self, texts: Sequence[str]) -> list[float]:
        """log p of each whole text: the sum over windows as long as the model's sequences."""
        return self.token_sequences([self.words.encode(text) for text in texts])

    def token_sequences(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The same for texts given as tokens."""
        parts = [list(self.windows(ids)) for ids in sequences]
        scores = iter(self._score([request for each in parts for request in each]))
        return [sum(next(scores)[0] for _ in each) for each in parts]

    def request(self, context: str, continuation: str) -> Request:
        """The two are tokenised together, so that the tokens are those of the joined text; spaces
        at the end of the context belong to the continuation."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        both, before = self.words.encode(context + continuation), self.words.encode(context)
        prompt, answer = before or self._beginning(), both[len(before) :]
        if self.truncate:
            room = self.trained.sequence_length + self.causal - len(answer)
            prompt = prompt[max(len(prompt) - max(room, self.causal), 0) :]
        return Request(tuple(prompt), tuple(answer))

    def windows(self, ids: Sequence[int]) -> Iterator[Request]:
        """An autoregressive model predicts each window from the last token before it (an end-of-
        text token before the first)."""
        length = self.trained.sequence_length
        for begin in range(0, len(ids), length):
            before = [ids[begin - 1]] if begin and self.causal else []
            yield Request(tuple(before or self._beginning()), tuple(ids[begin : begin + length]))

    def until(self, context: str, options: dict[str, Any]) -> str:
        """Greedy text behind ``context``, up to the first of the strings ``until``; of a diffusion
        model with the sampler that follows its diffusion."""
        eos = self.words.eos_id
        prompt = self.words.encode(context) or [0 if eos is None else eos]
        sampling = Sampling(temperature=options.get("temperature", 0.0))
        [ids] = continued(
            self.model, self.trained.objective, [prompt], options.get("max_gen_toks", 256),
            sampling, eos=eos, seed=self.scoring.seed,
        )  # fmt: skip
        text, stops = self.words.decode(ids), options.get("until") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.split(stop)[0]
        return text

    def _beginning(self) -> list[int]:
        """What stands for no context at all: diffusion models need nothing."""
        if not self.causal:
            return []
        if self.words.eos_id is None:
            raise ValueError("an autoregressive model needs an end-of-text token before a text")
        return [self.words.eos_id]

    def _score(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        length, objective = self.trained.sequence_length, self.trained.objective
        score = whole_likelihoods if family_of(objective) == "eso" else likelihoods
        found = score(self.model, objective, requests, length, self.scoring)
        return [(estimate.nats, bool(estimate.greedy)) for estimate in found]
