"""The fence of a shard: the epoch of the newest controller that has worked on it, which its log says."""

from __future__ import annotations

from app.state.errors import Fenced


def check_fence(location: str, *, fence: int, epoch: int) -> None:
    """`Fenced` if a newer controller than that with this epoch has worked on the shard: then it was replaced."""
    if fence > epoch:
        raise Fenced(f"A controller with epoch {fence} has worked on the shard at {location}; ours is {epoch}.")
