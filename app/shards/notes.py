"""What a commit of ours says of itself, so that it can be found again."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec


class Note(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="by", tag="holdfast"):
    """What a commit of ours says of itself, in the user metadata of its commitInfo."""

    token: str
    what: str
    expected: int | None = None
    upper: int | None = None
    since: int | None = None

    def json(self) -> str:
        return msgspec.json.encode(self).decode()


def note_in(commit_info: Mapping[str, Any]) -> Note | None:
    """The note in the first action of a commit; None if the commit is not ours."""
    text = (commit_info.get("commitInfo") or {}).get("userMetadata")
    try:
        return None if text is None else msgspec.json.decode(text, type=Note)
    except msgspec.MsgspecError:
        return None


def new_token() -> str:
    return uuid.uuid4().hex
