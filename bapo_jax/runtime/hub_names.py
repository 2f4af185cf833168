"""Parses names of Hugging Face repositories: hub:owner/name or hub:owner/name@revision.

A name without 'hub:' is a local path, so a mistyped path is never downloaded.
"""

import re
from typing import NamedTuple

PREFIX = 'hub:'
NAME = re.compile(r'hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?', re.ASCII)


class HubName(NamedTuple):
  repository: str  # owner/name
  revision: str | None  # a commit, tag or branch; None: the default branch


def parse(name: str) -> HubName | None:
  """Parses a hub name; returns None for a path, raises ValueError if malformed."""
  if not name.startswith(PREFIX):
    return None
  if not (match := NAME.fullmatch(name)):
    raise ValueError(
      f'{name[:80]!r} is not a hub name; write hub:owner/name or '
      'hub:owner/name@revision'
    )
  return HubName(match[1], match[2])
