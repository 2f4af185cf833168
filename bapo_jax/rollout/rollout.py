"""rollout = score . sample: the only door by which a response enters the run.

Training, re-evaluation and evaluation all come through here, so what is recorded cannot
differ between them.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax import types
from bapo_jax.data import prompts as prompts_lib
from bapo_jax.data import tokenizer
from bapo_jax.rewards import rewards
from bapo_jax.rollout import decode
from bapo_jax.rollout.engine import RolloutEngine
from bapo_jax.runtime.progress import progress_bar
from bapo_jax.types import Groups, Prompts


def rollout(
  params,
  problems: prompts_lib.Problems,
  prompts: Prompts,
  key,
  *,
  step: int,
  born: int,
  text: tokenizer.Tokenizer,
  group: int,
  clock,
  verify: Callable = rewards.verify,
  shape: Callable = rewards.plain,
  first: int = 0,
  flight: RolloutEngine | None = None,
  budget: float = math.inf,
  max_age: int = 0,
  cache: str = 'refresh',
  **sampling,
) -> Groups:
  """G scored responses to each of P prompts, or to prompts of earlier steps.

  Without a flight all are written before this returns, in the order of the prompts.
  With one, writing stops when the budget is spent (partial rollout; Balanced PO,
  section 5): the oldest finished groups come back, at most P, and the rest stays in
  flight for the next step's weights. A group that was asked `max_age` steps ago is
  written to its end whatever the budget: nothing that is learned from is older.

  Args:
    params: the weights that speak; `born` is the learner step that made them.
    step: the learner step at which the groups are completed.
    prompts: rows with id -1 are empty seats: nothing is sampled, born_P is -1.
    key: with the number of a response it makes its noise; numbers count from `first`.
    clock: times the phases 'sample' and 'score'.
    verify: (answers, texts, rules) -> bool, one for each response; the rule is that
      of its problem, '' where the problem names none.
    shape: (groups, texts) -> groups with other rewards; as it stands, none.
    flight: responses in flight, made for P * (max_age + 1) groups; it is advanced.
    budget: tokens a slot in this step.
    cache: 'refresh': responses in flight get the cache of these weights first, and
      their tokens' recorded log-probabilities are these weights'; 'keep': they go on
      with what the older weights computed.
    sampling: keywords of `flight.Flight`.
  """
  P, width = prompts.tokens_PT.shape
  if not P:
    return types.empty_groups(0, group, width + sampling['new'])
  uid_B = (first + np.arange(P * group)).astype(np.uint32)
  with clock('sample'):
    if flight is None:
      flight = RolloutEngine(
        places=P, width=width, group=group, eos=text.eos, **sampling
      )
      budget, max_age = math.inf, 0
    elif cache == 'refresh' or flight.cold:
      flight.refresh(params)
    flight.ask(prompts, uid_B, step)
    marks = PendingVerifications(verify, problems, text, flight)
    with progress_bar(flight.unfinished, 'sampling', 'response') as progress:
      flight.advance(
        params,
        key,
        born=born,
        budget=budget,
        due_W=(flight.asked_W >= 0) & (flight.asked_W <= step - max_age),
        tell=lambda rows: (_show_rate(progress, flight, rows), marks.land(rows)),
      )
    places = flight.finished()[:P]
    rows = jax.block_until_ready(flight.read(places, P))
  with clock('score'):
    id_P = np.pad(flight.id_W[places], (0, P - len(places)), constant_values=-1)
    said = _read(text, rows.tokens_BT, rows.chosen_BT)
    correct_B = marks.of(places, id_P, said)
  groups = shape(_fold(rows, id_P, correct_B, step), said)
  flight.free(places)
  return groups


class PendingVerifications:
  """Verdicts; those that take long are asked for while other responses are written.

  Args:
    verify: (answers, texts, rules) -> bool each; a `rewards.Judge` may be asked early.
  """

  def __init__(self, verify: Callable, problems, text, flight: RolloutEngine):
    self.verify, self.problems, self.text, self.flight = verify, problems, text, flight
    self.own = problems.verifier or [''] * len(problems.answer)
    slow = getattr(verify, 'slow', lambda rules: False)
    self.early = slow({self.own[i] for i in flight.id_W if i >= 0})
    self.asked: dict[int, tuple] = {}  # row -> verdicts, place among them

  def _about(self, ids) -> tuple[list[str], list[str]]:
    return [self.problems.answer[i] for i in ids], [self.own[i] for i in ids]

  def land(self, rows: list[int]) -> None:
    """Rows have just been finished: where verdicts take long, asks for them now."""
    if self.early:
      self._ask(rows)

  def _ask(self, rows: list[int]) -> None:
    step, flight = len(self.flight.row_S), self.flight
    for first in range(0, len(rows), step):  # one shape, one compile
      part = rows[first : first + step]
      found = decode.take_rows(flight.rows, np.pad(part, (0, step - len(part))))
      said = _read(self.text, found.tokens_BT, found.chosen_BT)[: len(part)]
      about = self._about(flight.id_W[np.asarray(part) // flight.group])
      verdicts = self.verify.submit(about[0], said, about[1])
      self.asked |= {row: (verdicts, i) for i, row in enumerate(part)}

  def of(self, places, id_P, texts: list[str]) -> np.ndarray:
    """bool: the responses of these places, and of empty seats after them, are right."""
    G = self.flight.group
    if not self.early:
      answers, rules = self._about(np.repeat(id_P, G))
      return self.verify(answers, texts, rules)
    rows = (places[:, None] * G + np.arange(G)).ravel().tolist()
    self._ask([row for row in rows if row not in self.asked])
    made = {id(v): v.result() for v, _ in (self.asked[row] for row in rows)}
    found = [made[id(v)][i] for v, i in (self.asked[row] for row in rows)]
    return np.pad(self.verify.settle(found), (0, len(texts) - len(found)))


def _show_rate(progress, flight: RolloutEngine, rows: list[int]) -> None:
  rate = flight.tokens / max(progress.format_dict['elapsed'], 1e-9)
  told = f'{rate:.0f} tokens/s, {flight.busy} slots busy'
  progress.set_postfix_str(told, refresh=False)
  progress.update(len(rows))


@jax.jit
def _fold(rows, id_P, correct_B, step) -> Groups:
  # Nobody answered an empty seat, whatever the verifier makes of no text.
  correct_PG = correct_B.reshape(rows.tokens_BT.shape[:2]) & (id_P >= 0)[:, None]
  return Groups(
    id_P=id_P,
    tokens_PGT=rows.tokens_BT,
    chosen_PGT=rows.chosen_BT,
    logp_PGT=rows.logp_BT,
    born_PGT=rows.born_BT,
    correct_PG=correct_PG,
    reward_PG=correct_PG.astype(jnp.float32),
    born_P=jnp.where(id_P < 0, -1, step).astype(jnp.int32),
  )


def texts(text: tokenizer.Tokenizer, groups: Groups) -> list[list[str]]:
  """The responses as text, a list a group."""
  P, G, _ = groups.tokens_PGT.shape
  flat = _read(text, groups.tokens_PGT, groups.chosen_PGT)
  return [flat[i * G : (i + 1) * G] for i in range(P)]


def _read(text, tokens_PGT, chosen_PGT) -> list[str]:
  T = tokens_PGT.shape[-1]
  return tokenizer.decode_responses(
    text, np.asarray(tokens_PGT).reshape(-1, T), np.asarray(chosen_PGT).reshape(-1, T)
  )
