"""Steps that succeed on all ranks or raise on all of them.

A rank that fails alone leaves the others waiting in their next collective. Work that can fail
on one rank (files, disks, checks of what it was given) goes through ``Ranks.exchange``.
"""

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

_AGREED = "(raised on every rank)"

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class _Outcome(Generic[T]):
    """The value of a step, or why there is none. ``expected``: a user can mend it."""

    value: T | None = None
    error: str | None = None
    expected: bool = True


class Ranks:
    """The ranks of a gloo group, or this process alone (``group`` None).

    ``error`` is the exception class for what a user can mend: raised inside a step it keeps
    its text, and an OSError becomes one. Anything else is raised as RuntimeError with the
    traceback of the rank it came from.
    """

    def __init__(self, group: dist.ProcessGroup | None, error: type[ValueError]) -> None:
        self.group = group
        self.error = error
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def exchange(
        self, what: str, local: Callable[[], T], combine: Callable[[list[T]], Sequence[R]]
    ) -> R:
        """Run ``local`` on every rank, ``combine`` on rank 0 with the values by rank, and
        return to each rank its own element of the result.

        ``what`` begins the error text. All values are pickled.
        """
        mine = self._attempt(local)
        outcomes: list[Any] = [mine] * self.size
        if self.group is not None:
            # Only rank 0 may pass a list to fill.
            room = outcomes if self.rank == 0 else None
            dist.gather_object(mine, room, group=self.group, group_dst=0)
        answers: list[Any] = [None] * self.size
        if self.rank == 0:
            answers = self._combine(outcomes, combine)
        answer = answers[:1]
        if self.group is not None:
            sent = answers if self.rank == 0 else None
            dist.scatter_object_list(answer, sent, group=self.group, group_src=0)
        if answer[0].error is not None:
            error = (self.error if answer[0].expected else RuntimeError)(
                f"{what}: {answer[0].error}"
            )
            error.add_note(_AGREED)
            raise error
        return answer[0].value

    def _attempt(self, work: Callable[[], T]) -> _Outcome[T]:
        try:
            return _Outcome(work())
        except self.error as error:
            return _Outcome(error=str(error))
        except Exception as error:
            # torch's writer hides a full disk behind an error of its own.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                return _Outcome(error=traceback.format_exc(), expected=False)
            return _Outcome(error=str(cause))

    def _combine(
        self, outcomes: list[_Outcome[T]], combine: Callable[[list[T]], Sequence[R]]
    ) -> list[_Outcome[R]]:
        failures: dict[str, list[int]] = {}
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                failures.setdefault(outcome.error, []).append(rank)
        if failures:
            text = "; ".join(
                error if len(ranks) == self.size else f"rank {numbers(ranks)}: {error}"
                for error, ranks in failures.items()
            )
            expected = all(outcome.expected for outcome in outcomes)
            return [_Outcome(error=text, expected=expected)] * self.size
        result = self._attempt(lambda: combine([o.value for o in outcomes]))  # type: ignore[misc]
        if result.value is None:
            return [_Outcome(error=result.error, expected=result.expected)] * self.size
        return [_Outcome(value) for value in result.value]


def is_agreed(error: BaseException) -> bool:
    """Whether all ranks raised this same error together, so that one of them can report it."""
    return _AGREED in getattr(error, "__notes__", ())


def numbers(values: Iterable[int]) -> str:
    """``1, 2, 5``."""
    return ", ".join(map(str, values))
