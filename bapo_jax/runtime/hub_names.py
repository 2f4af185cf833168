"""Parses names of repositories on the hub: hub:owner/name or hub:owner/name@revision.

A name without `hub:` is a path on this machine: a mistyped path is never downloaded.
"""

import re
from typing import NamedTuple

PREFIX = 'hub:'
NAME = re.compile(r'hub:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?', re.ASCII)


class HubName(NamedTuple):
  """A repository of the hub, at one revision."""

  repository: str  # owner/name
  revision: str | None  # a commit, tag or branch; None: the default branch


def parse(name: str) -> HubName | None:
  """Returns the repository of a hub name; None for a path on this machine.

  Raises:
    ValueError: the name begins with hub: and is malformed.
  """
  if not name.startswith(PREFIX):
    return None
  if not (match := NAME.fullmatch(name)):
    raise ValueError(
      f'{name[:80]!r} is not a name on the hub; write hub:owner/name or '
      'hub:owner/name@revision'
    )
  return HubName(match[1], match[2])
