"""A priority queue of containers of which the least loaded one with enough space is taken."""

import heapq


class SpaceQueue:
    """Containers by load and number.

    Those found without enough space wait, ordered by space, until less is needed; so a search does not pass them again
    for every item.
    """

    def __init__(self) -> None:
        self._by_load: list[tuple[float, int, int]] = []  # load, number, space
        self._by_space: list[tuple[int, float, int]] = []  # -space, load, number

    def push(self, load: float, number: int, space: int) -> None:
        """Add a container."""
        heapq.heappush(self._by_load, (load, number, space))

    def find(self, needed: int) -> tuple[float, int] | None:
        """Return (load, number) of the least loaded container with the needed space; None if none has it."""
        while self._by_space and -self._by_space[0][0] >= needed:
            space, load, number = heapq.heappop(self._by_space)
            self.push(load, number, -space)
        while self._by_load and self._by_load[0][2] < needed:
            load, number, space = heapq.heappop(self._by_load)
            heapq.heappush(self._by_space, (-space, load, number))
        return self._by_load[0][:2] if self._by_load else None

    def pop(self) -> None:
        """Remove the container that `find` returned last."""
        heapq.heappop(self._by_load)
