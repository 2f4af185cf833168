"""Puts messages of an environment between the turns of a response, as tokens.

1. `between` finds the text that a chat template puts around a message, and refuses a
   template that rewrites earlier turns: their tokens have been sampled;
2. `tokens_of` gives the tokens of a message;
3. `parts_of` divides a response into turns and messages again, and `messages` names
   who wrote each.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.tokenizer import Tokenizer

# Texts that templates are known to change: thinking in earlier turns, quotes.
TURNS = ('forty-two', '<think>\nsix times seven\n</think>\n\nforty-two')
MESSAGE = 'forty-"two"\nand one'


class Between(NamedTuple):
  """The text between two turns: `head`, the message, `tail`."""

  head: str = ''  # the end of the turn, and the beginning of the message
  tail: str = ''  # the end of the message, and the beginning of the next turn
  role: str = 'user'  # of the messages


def between(tokenizer: Tokenizer, role: str) -> Between:
  """Returns the text around messages; without a chat template there is none.

  Raises:
    ValueError: the chat template fails, or changes earlier turns or a message.
  """
  if not tokenizer.template.startswith('chat:'):
    return Between(role=role)
  around = Between(role=role)
  for turn in TURNS:
    chat = messages('six times seven', [turn, MESSAGE], role)
    chats = [chat[:1], chat]
    opened, text = tokenizer_lib.render(tokenizer.backend, chats, answered=False)
    before, message, tail = text.partition(MESSAGE)
    if not message or not before.startswith(opened + turn):
      raise ValueError(
        'rollout.environment: the chat template of '
        f'{tokenizer.backend.name_or_path!r} changes earlier turns of a conversation '
        f'(such as their thinking), or messages of the role {role!r}, but sampled '
        'tokens cannot change; correct the chat template, or write the whole prompt '
        "in tokenizer.template without the prefix 'chat:'"
      )
    around = Between(before.removeprefix(opened + turn), tail, role)
  return around


def tokens_of(tokenizer: Tokenizer, b: Between, message: str, last: int) -> list[int]:
  """Returns the tokens of a message, which follow the token `last` of a turn.

  Special tokens in a message are encoded as text. In a chat the message is stripped,
  as most templates do.

  Raises:
    ValueError: the tokenizer has no token for a character.
  """
  special = tokenizer_lib.special_tokens(tokenizer.backend, spared='(?!)')
  text = tokenizer_lib.without_special(special, message)
  text = b.head + (text.strip() if b.head else text) + b.tail
  ids = tokenizer_lib.encode_parts(tokenizer, text)
  return ids[1:] if ids[:1] == [last] else ids


def parts_of(
  tokenizer: Tokenizer, b: Between, tokens_T: np.ndarray, mask_T: np.ndarray
) -> list[str]:
  """Returns the texts of a response in order: a turn, a message, a turn and so on.

  `mask_T` is True where the policy sampled the token. Turns are without end tokens.
  """
  written = np.flatnonzero(mask_T)
  if not len(written):
    return ['']
  span = slice(written[0], written[-1] + 1)
  edges = np.flatnonzero(np.diff(mask_T[span])) + 1
  parts = [part.tolist() for part in np.split(tokens_T[span], edges)]
  parts[::2] = [[i for i in part if i not in tokenizer.eos] for part in parts[::2]]
  texts = tokenizer.decode(parts)
  ends = tokenizer.decode([[i] for i in tokenizer.eos])
  end = next(filter(b.head.startswith, ends), '')  # the turn may have sampled it
  for i in range(1, len(texts), 2):
    text = texts[i].removesuffix(b.tail).removeprefix(b.head)
    texts[i] = text.removeprefix(b.head.removeprefix(end))
  return texts


def script(messages: Iterable[Mapping[str, str]]) -> str:
  """Returns messages as text, each after its role."""
  return '\n'.join(f'[{x["role"]}] {x["content"]}' for x in messages)


def messages(
  problem: str,
  parts: Sequence[str],
  role: str,
  history: Sequence[tuple[str, str]] = (),
) -> list[dict[str, str]]:
  """Returns who said what: earlier turns, the problem, the parts of a response."""
  roles = [role if i % 2 else 'assistant' for i in range(len(parts))]
  said = [*history, ('user', problem), *zip(roles, parts, strict=True)]
  return [dict(role=x, content=text) for x, text in said]
