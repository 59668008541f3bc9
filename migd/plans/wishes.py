"""From a rule to the wish for one GPU, in the names that this GPU offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from migd.mig.boards import Board
from migd.mig.geometry import Counts, counts
from migd.mig.observed import SeenGpu
from migd.mig.profiles import MIB_PER_GB, Profile, match_name, nearest_names, smallest_enough
from migd.plans.plan import InstanceRule, Rule


@dataclass(frozen=True, slots=True)
class Wish:
    """What one GPU should be: MIG on or off, and how many of each profile, named as its board names them.

    allow_empty: MIG on with nothing in it is meant.
    """

    mig: bool
    counts: Counts = ()
    allow_empty: bool = False


@dataclass(frozen=True, slots=True)
class UnknownYet:
    """A wish that can be judged only once MIG is on: an older driver lists no profiles before. wanted: as written."""

    wanted: tuple[str, ...]
    message: str


RefusalReason = Literal["Infeasible", "UnknownProfile", "NotCapable", "NVMLError"]


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a wish can never be met on this GPU.

    left_over: what finds no place. nearest: layouts that do fit; both empty where profiles are not even known.
    """

    reason: RefusalReason
    message: str
    left_over: Counts = ()
    nearest: tuple[Counts, ...] = ()


def resolve(rule: Rule, gpu: SeenGpu) -> Wish | Refused | UnknownYet:
    """The wish that a rule means for a GPU, or why it has none there.

    Names are matched to the board's own; a different profile is never put in place of an unknown one. MIG off is
    satisfied on a GPU that cannot do MIG.
    """
    if rule.instances is None:
        return Wish(mig=False)
    if gpu.mode is None:
        return Refused("NotCapable", f"{gpu.model or 'this GPU'} is not MIG-capable")
    if not rule.instances:
        return Wish(mig=True, allow_empty=True)
    if gpu.board is None:
        return _without_board(rule.instances, gpu)
    totals: dict[str, int] = {}
    refused: list[str] = []
    reason: RefusalReason = "Infeasible"
    for item in rule.instances:
        found = _profile_for(item, gpu.board)
        if isinstance(found, Refused):
            refused.append(found.message)
            reason = "UnknownProfile" if found.reason == "UnknownProfile" else reason
        else:
            totals[found.name] = totals.get(found.name, 0) + item.count
    if refused:
        return Refused(reason, f"{'; '.join(refused)}; {gpu.model or 'this GPU'} offers {_offered(gpu.board)}")
    return Wish(True, counts(totals), rule.allow_empty)


def _without_board(instances: Sequence[InstanceRule], gpu: SeenGpu) -> Refused | UnknownYet:
    if gpu.mig_on:
        return Refused("NVMLError", "MIG is on, but the driver lists no profiles for this GPU")
    wanted = tuple(f"{item.count}×{item}" if item.count > 1 else str(item) for item in instances)
    return UnknownYet(
        wanted,
        f"this driver lists no profiles while MIG is off: whether {' + '.join(wanted)} fits is known once MIG is on",
    )


def _profile_for(item: InstanceRule, board: Board) -> Profile | Refused:
    if item.profile is None:
        return _for_need(item, board)
    found = match_name(item.profile, board.profiles)
    if len(found) == 1:
        return found[0]
    if found:
        both = " and ".join(p.name for p in found)
        return Refused("UnknownProfile", f"{item.profile} could be {both}: write which")
    near = nearest_names(item.profile, board.profiles)
    hint = f" (nearest: {', '.join(near)})" if near else ""
    return Refused("UnknownProfile", f"{item.profile} is not offered{hint}")


def _for_need(item: InstanceRule, board: Board) -> Profile | Refused:
    assert item.memory_gb is not None
    found = smallest_enough(item.memory_gb * MIB_PER_GB, board.profiles, item.compute_slices or 1)
    return found or Refused("Infeasible", f"no profile is large enough for {item}")


def _offered(board: Board) -> str:
    by_size = sorted(board.profiles, key=lambda p: (p.compute_slices, p.memory_gb, p.name))
    return ", ".join(p.name for p in by_size) or "no profiles"
