"""Problems with pictures as a run has them: tokens, texts, answers and pictures.

What prompts.py does for texts. Two problems are the same where their texts and their
pictures are. Nothing is stored in the workdir: pictures are read from their source.
"""

from collections.abc import Sequence

from bapo_jax.data import dedup, pictured_prompts, prompts, sources
from bapo_jax.data.knobs import ProblemsConfig, PromptsConfig
from bapo_jax.data.pictured_files import PicturedRow
from bapo_jax.data.prompts import Problems
from bapo_jax.data.row import Row
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models.vision.spec import VisionSpec
from bapo_jax.runtime.progress import log


def load(
  tokenizer: Tokenizer,
  prompts_knobs: PromptsConfig,
  problems: ProblemsConfig,
  v: VisionSpec,
) -> tuple[Problems, Problems]:
  """Training and held-out problems with their pictures, as `prompts.load`.

  Raises:
    ValueError: a source or a picture cannot be read, a prompt is too long, or too few
      are left.
  """
  rows = [unique_rows(problems, knob) for knob in sources.SPLITS]
  return tables(tokenizer, prompts_knobs, problems, rows, v)


def tables(
  tokenizer: Tokenizer,
  prompts_knobs: PromptsConfig,
  problems: ProblemsConfig,
  rows: Sequence[Sequence[PicturedRow]],
  v: VisionSpec,
) -> tuple[Problems, Problems]:
  """Training and held-out problems of these rows, two lists, as `load` gives them.

  Raises:
    ValueError: as `load`.
  """
  training, held_out = rows
  both, message = overlap(problems, training, held_out)
  if both and problems.overlap == 'drop':
    training = [row for i, row in enumerate(training) if i not in both]
    log(message + '; they are not trained on')
  elif both:
    log(message + '; problems.overlap=keep')
  most, drop = prompts_knobs.max_prompt_tokens, prompts_knobs.overlong == 'drop'
  loaded = (
    tokenize(tokenizer, training, most, v, drop=drop),
    tokenize(tokenizer, held_out, most, v, drop=False),
  )
  prompts.check_count(loaded[0], prompts_knobs.count)
  return loaded


def overlap(
  problems: ProblemsConfig,
  training: Sequence[PicturedRow],
  held_out: Sequence[PicturedRow],
) -> tuple[set[int], str]:
  """Training problems that are held out too, as `dedup.overlap`."""
  if problems.source == problems.test_source == 'drawn':
    return set(), ''  # they differ by construction, even where blank pictures hide it
  return dedup.overlap(_keyed(training), _keyed(held_out))


def load_held_out(
  tokenizer: Tokenizer,
  prompts_knobs: PromptsConfig,
  problems: ProblemsConfig,
  v: VisionSpec,
) -> Problems:
  """The held-out problems alone, for an evaluation without training.

  Raises:
    ValueError: as `load`.
  """
  rows = unique_rows(problems, 'test_source')
  return tokenize(tokenizer, rows, prompts_knobs.max_prompt_tokens, v, drop=False)


def unique_rows(problems: ProblemsConfig, knob: sources.Knob) -> list[PicturedRow]:
  """The rows of a source, each once unless problems.duplicates='keep'; logs repeats.

  Drawn problems differ by construction, even where blank pictures hide it.

  Raises:
    ValueError: they cannot be made or read.
  """
  rows = sources.pictured_rows(problems, knob)
  if getattr(problems, knob) == 'drawn':
    return rows
  keyed = _keyed(rows)
  unique, message = dedup.deduplicate(
    keyed, f'problems.{knob}={getattr(problems, knob)}'
  )
  drop = problems.duplicates == 'drop'
  if message:
    counts = 'the first of each counts' if drop else 'problems.duplicates=keep'
    log(f'{message}; {counts}')
  if not drop:
    return rows
  first = dict(zip(reversed(keyed), reversed(rows), strict=True))
  return [first[row] for row in unique]


def tokenize(
  tokenizer: Tokenizer,
  rows: Sequence[PicturedRow],
  max_prompt_tokens: int,
  v: VisionSpec,
  *,
  drop: bool,
) -> Problems:
  """The problems of these rows, as `prompts.tokenize`.

  Raises:
    ValueError: a prompt is too long, or a picture cannot be read.
  """
  encoded = pictured_prompts.encode(tokenizer, rows, v)
  if drop:
    fits = prompts.fitting([each.tokens for each in encoded], max_prompt_tokens)
    rows, encoded = [rows[i] for i in fits], [encoded[i] for i in fits]
  texts = [row for row, _ in rows]
  found = prompts.table(texts, [each.tokens for each in encoded], max_prompt_tokens)
  return found._replace(
    pictures=[files for _, files in rows], grids=[each.grids for each in encoded]
  )


def _keyed(rows: Sequence[PicturedRow]) -> list[Row]:
  """The rows with their pictures' digests in their texts."""
  return [
    row._replace(problem='\n'.join([row.problem, *prompts.picture_digests(files)]))
    for row, files in rows
  ]
