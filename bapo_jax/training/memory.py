"""A lower limit of the memory of a run, counted by hand so that nothing is allocated.

What a real model needs, --mode=plan says.
"""

from bapo_jax.models.knobs import ModelConfig

Rows = tuple[str, int]  # the knobs that set the number of rows, and the number
DECODED = 12  # bytes per token of a row in decoding: token, log-probability, version
RECORDED = 13  # bytes per token of a row of Groups: those and the response mask


def needs(
  model: ModelConfig,
  length: int,
  micro_rows: int,
  decoding: Rows,
  batch: Rows,
  slots: Rows,
  buffer: Rows,
  solutions: Rows,
  evaluation: Rows,
  *,
  scores: bool,
) -> dict[str, int]:
  """Bytes of what the largest phase of a run holds at once, by its knobs.

  Args:
    model: one with a path counts nothing: its sizes are not known here.
    length: T, tokens per row.
    micro_rows: rows of a micro-batch.
    scores: attention holds its [T, T] scores, as the plain kernel does.
  """
  half = 2 if model.compute == 'bfloat16' else 4  # bytes per number
  head = model.kv_heads * model.head_width
  per_token = half * (model.width + scores * model.heads * length)
  weights = {'weights and optimiser (model.*)': (12 + half) * model.parameters}
  cache = {slots[0]: slots[1] * length * (DECODED + 2 * half * model.layers * head)}
  if model.path:
    weights, cache, per_token = {}, {}, 0
  held = weights | {buffer[0]: 2 * RECORDED * buffer[1] * length}
  phases = (
    weights | {solutions[0]: solutions[1] * length * per_token},
    held | cache | {decoding[0]: DECODED * decoding[1] * length},
    held
    | {batch[0]: RECORDED * batch[1] * length}
    | {
      'a micro-batch (learner.minibatches, learner.grad_accum_steps)': micro_rows
      * length
      * per_token
    },
    held | cache | {evaluation[0]: DECODED * evaluation[1] * length},
  )
  return max(phases, key=lambda phase: sum(phase.values()))
