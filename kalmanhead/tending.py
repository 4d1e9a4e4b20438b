"""Which heads of a bank may sleep, and when its grid goes on beyond its edge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kalmanhead.bank_group import Group

# A group of heads whose weight stayed at the floor for so many batches falls asleep ...
PATIENCE = 200
# ... and is woken for two batches of so many: one to catch up, one to show what it can do.
NAP = 16
# So many batches in the lead let the precision at the edge of a grid bring in one beyond it.
EXTEND_AFTER = 100


class Tending:
    """Counts how long groups have not mattered, and for how long one head has led.

    Parameters
    ----------
    groups:
        How many groups of heads there are.
    driving:
        The group that drives the backbone, which never sleeps.
    """

    def __init__(self, groups: int, driving: int) -> None:
        self.driving = driving
        self.idle = [0] * groups
        self.leader, self.leading = 0, 0

    def awake(self, batches: int) -> list[bool]:
        """Which groups learn from the batch after so many."""
        nap = batches % NAP > 1
        return [i == self.driving or idle < PATIENCE or not nap for i, idle in enumerate(self.idle)]

    def follow(
        self, groups: Sequence[Group], largest: Sequence[float], share: float, batches: int = 1
    ) -> None:
        """Take note of the weights after a batch.

        Parameters
        ----------
        groups:
            The groups.
        largest:
            Weight of each head, in the order of the groups, for the output that values it most.
        share:
            Weight that all heads are given whatever they foresee.
        batches:
            How many batches the weights stand for.
        """
        floor = 2 * share / len(largest)
        leader = max(range(len(largest)), key=largest.__getitem__)
        self.leading = self.leading + batches if leader == self.leader else 0
        self.leader = leader
        at = 0
        for i, group in enumerate(groups):
            weight = max(largest[at : at + len(group)])
            self.idle[i] = 0 if weight > floor or share == 0 else self.idle[i] + batches
            at += len(group)

    def beyond(self, groups: Sequence[Group]) -> tuple[int, int, int] | None:
        """Group, edge and head to be replaced, if the grid should go on beyond a leader.

        Edge and head are numbered within the group.
        """
        at = 0
        for i, group in enumerate(groups):
            edge = self.leader - at
            if 0 <= edge < len(group) and self.leading >= EXTEND_AFTER and group.can_extend(edge):
                self.leading = 0
                return i, edge, group.far(edge)
            at += len(group)
        return None

    def state(self) -> dict[str, Any]:
        """What must be kept to go on exactly."""
        return {"idle": list(self.idle), "leader": self.leader, "leading": self.leading}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.idle = list(state["idle"])
        self.leader, self.leading = state["leader"], state["leading"]
