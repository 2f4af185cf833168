"""Tokenizes problems to rows of equal length; prompt_rules.py chooses among them."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

from bapo_jax.data import dedup, pictures, sources
from bapo_jax.data import tokenizer as tokenizer_lib
from bapo_jax.data.knobs import ProblemsConfig
from bapo_jax.data.pictures import Grid
from bapo_jax.data.prompt_rules import PromptRule
from bapo_jax.data.row import Row
from bapo_jax.data.sources import Data
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.runtime.progress import log
from bapo_jax.types import Prompts


class Problems(NamedTuple):
  """A data set of N tokenized problems."""

  id_N: Int32[np.ndarray, ' N']  # 0..N-1, the row number
  tokens_NT: Int32[np.ndarray, 'N T']  # the prompt from column 0, then padding
  length_N: Int32[np.ndarray, ' N']  # tokens in the prompt
  rows: Sequence[Row]
  grids: Sequence[tuple[Grid, ...]] = ()  # height and width of each picture, in patches


class EncodedPrompt(NamedTuple):
  tokens: list[int]
  grids: tuple[Grid, ...]


def load(
  tokenizer: Tokenizer,
  prompts: PromptRule,
  problems: ProblemsConfig,
  data: Data,
  vision: VisionSpec | None = None,
) -> tuple[Problems, Problems]:
  """Returns training and held-out problems of the rows that were read.

  Overlapping problems and overlong training prompts are logged, and dropped if the
  knobs say so. Held-out problems are all kept, so that scores stay comparable.

  Raises:
    ValueError: unreadable picture, too long a prompt, or too few problems.
  """
  training, held_out = split(problems, data)
  limit = prompts.max_prompt_tokens
  drop = prompts.overlong == 'drop'
  table = tabulate(tokenizer, training, limit, vision, drop=drop)
  held_out_table = tabulate(tokenizer, held_out, limit, vision, drop=False)
  if prompts.count > len(table.id_N):
    raise ValueError(
      f'prompts.count={prompts.count} is too large for only {len(table.id_N)} '
      'problems; lower prompts.count or give more training problems'
    )
  return table, held_out_table


def split(
  problems: ProblemsConfig, data: Data, *, quiet: bool = False
) -> tuple[list[Row], list[Row]]:
  """Returns the rows of training and held-out problems; logs repeats and overlap.

  Raises:
    ValueError: problems.overlap=drop drops every row.
  """
  training, held_out = (
    sources.unique(problems, data, knob, quiet=quiet) for knob in sources.SPLITS
  )
  both, message = dedup.overlap(training, held_out)
  if not both:
    return training, held_out
  done = 'kept, because problems.overlap=keep'
  if problems.overlap == 'drop':
    training = [row for i, row in enumerate(training) if i not in both]
    done = 'dropped from the training problems'
  if not training:
    raise ValueError(
      f'problems.overlap=drop: no training problem is left, because all problems of '
      f'problems.source={problems.source} are held out too '
      f'(problems.test_source={problems.test_source}); give other training problems'
    )
  if not quiet:
    log(f'{message}; they are {done}')
  return training, held_out


def tabulate(
  tokenizer: Tokenizer,
  rows: Sequence[Row],
  max_prompt_tokens: int,
  vision: VisionSpec | None = None,
  *,
  drop: bool,
) -> Problems:
  """Tokenizes prompts, padded to T = max_prompt_tokens; `drop` leaves out longer ones.

  Raises:
    ValueError: a prompt is too long and `drop` is off, or a picture cannot be read.
  """
  encoded = encode(tokenizer, rows, vision)
  if drop:
    fits = [i for i, x in enumerate(encoded) if len(x.tokens) <= max_prompt_tokens]
    if len(fits) < len(rows):
      log(
        f'prompts.max_prompt_tokens={max_prompt_tokens}: '
        f'{len(rows) - len(fits)} of {len(rows)} training prompts are longer, up to '
        f'{max(len(x.tokens) for x in encoded)} tokens, and are dropped'
      )
    rows = [rows[i] for i in fits]
    encoded = [encoded[i] for i in fits]
  for row, (tokens, _) in zip(rows, encoded, strict=True):
    if len(tokens) > max_prompt_tokens:
      raise ValueError(
        f'prompts.max_prompt_tokens={max_prompt_tokens} is too small: the prompt of '
        f'{row.problem[:60]!r} has {len(tokens)} tokens; raise the limit'
      )
  return padded(rows, encoded, max_prompt_tokens)


def padded(
  rows: Sequence[Row], encoded: Sequence[EncodedPrompt], length: int
) -> Problems:
  """Returns the problems of encoded prompts, padded to T = `length` tokens."""
  tokens_NT = np.zeros((len(rows), length), np.int32)
  for tokens_T, prompt in zip(tokens_NT, encoded, strict=True):
    tokens_T[: len(prompt.tokens)] = prompt.tokens
  return Problems(
    id_N=np.arange(len(rows), dtype=np.int32),
    tokens_NT=tokens_NT,
    length_N=np.asarray([len(x.tokens) for x in encoded], np.int32),
    rows=rows,
    grids=[x.grids for x in encoded],
  )


def encode(
  tokenizer: Tokenizer, rows: Sequence[Row], vision: VisionSpec | None = None
) -> list[EncodedPrompt]:
  """Returns the encoded prompt of each problem, without a length limit.

  Repeats the picture token of each `<image>` once per merged patch of the picture.

  Raises:
    ValueError: a problem has pictures and the model is text-only, a picture cannot be
      read, or picture tokens and pictures differ in number.
  """
  if vision is None:
    for row in rows:
      pictures.check_row(row, has_vision=False)
    return [EncodedPrompt(x, ()) for x in tokenizer_lib.encode_prompts(tokenizer, rows)]
  image = tokenizer.backend.convert_ids_to_tokens(vision.image_token)
  encoded = []
  ids_N = tokenizer_lib.encode_prompts(tokenizer, rows, image)
  for row, ids in zip(rows, ids_N, strict=True):
    if ids.count(vision.image_token) != len(row.pictures):
      raise ValueError(
        f'the prompt of {row.problem[:60]!r} has {ids.count(vision.image_token)} '
        f'{image} for {len(row.pictures)} pictures; remove {image} from the problem or '
        'choose another chat template'
      )
    grids = tuple(pictures.grid(file, vision) for file in row.pictures)
    merged = iter([high * wide // vision.merge**2 for high, wide in grids])
    tokens = []
    for token in ids:
      tokens += [token] * (next(merged) if token == vision.image_token else 1)
    encoded.append(EncodedPrompt(tokens, grids))
  return encoded


def fingerprint(problems: Problems) -> str:
  """Returns a digest of ids, texts, answers and verifiers, 16 hexadecimal digits long.

  System messages, earlier turns, pictures, names of sets and given solutions enter only
  if present, so older digests stay valid.
  """
  rows = problems.rows
  basic = [(row.problem, row.answer, row.verifier) for row in rows]
  optional = [
    (
      row.system,
      row.fields,  # custom functions may read them
      pictures.digests(row.pictures),
      row.history,
      row.set,
      '' if callable(row.solutions) else row.solutions,
    )
    for row in rows
  ]
  columns = [problems.id_N.tolist(), *zip(*basic, strict=True)]
  columns += filter(any, zip(*optional, strict=True))
  return _digest(zip(*columns, strict=True))


def prompt_fingerprint(problems: Problems) -> str:
  """Returns a digest of the tokens of all prompts, 16 hexadecimal digits long."""
  rows = zip(problems.tokens_NT, problems.length_N, strict=True)
  return _digest(tokens_T[:length].tolist() for tokens_T, length in rows)


def _digest(rows: Iterable[Any]):
  digest = hashlib.sha256()
  for row in rows:
    digest.update(json.dumps(row).encode() + b'\n')
  return digest.hexdigest()[:16]


def prompts_by_id(problems: Problems, id_P: ArrayLike) -> Prompts:
  """Returns the prompts of the problems with these ids; id -1 has an empty prompt."""
  id_P = np.asarray(id_P, np.int32)
  length_P = np.where(id_P < 0, 0, problems.length_N[id_P]).astype(np.int32)
  return Prompts(id_P, problems.tokens_NT[id_P], length_P)
