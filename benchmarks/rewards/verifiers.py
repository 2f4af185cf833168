"""Measures the answers per second of each verifier.

  python -m benchmarks.rewards.verifiers [--count=20000] [--characters=2000]
      [--workers=2]

Every rule verifies --count responses: --characters of worked text with a few braces,
then an answer, right in every other one. `aime_short` has responses of the embedded
default's size. `math` goes through --workers processes, a tenth of the count, after the
pool is warm: no two fractions are alike, so that each is parsed and compared;
`math_integer` needs no parser. Best of three. Prints a table and, as the last line, one
JSON object {verifier: answers_per_s}.
"""

import argparse
import json
import time

from bapo_jax.rewards.knobs import Verification
from bapo_jax.rewards.rewards import Verifier
from bapo_jax.rewards.score import Sample

WORK = r'We have $x_{1} + y^{2} = \frac{a}{b}$ and 12, 34, so it follows that '
COUNTDOWN = '{"numbers": [2, 2, 3, 8], "target": 24}'
ANSWERS = {  # verifier -> answer, right, wrong; N is counted up, M is 2 N
  'aime': ('204', r'\boxed{204}', r'\boxed{205}'),
  'gsm8k': ('70000', '#### 70,000', '#### 70,001'),
  'countdown': (COUNTDOWN, r'\boxed{8 * 3 * 2 / 2}', r'\boxed{8 * 3 + 2 * 2}'),
  'exact': ('B', 'Answer: B', 'Answer: C'),
  'math': (r'\frac{1}{2}', r'\boxed{\frac{N}{M}}', r'\boxed{\frac{N}{M+1}}'),
  'math_integer': ('204', r'\boxed{0204}', r'\boxed{1N}'),
}


def responses(right: str, wrong: str, count: int, characters: int) -> list[str]:
  """Returns responses: worked text, then the answer on a separate line."""
  work = (WORK * (characters // len(WORK) + 1))[:characters]
  answers = [wrong if i % 2 else right for i in range(count)]
  return [
    f'{work}\n{text.replace("N", str(n)).replace("M", str(2 * n))}'
    for n, text in enumerate(answers, 2)
  ]


def rate(verifier: Verifier, answer: str, texts: list[str]) -> float:
  """Returns answers per second; exits if a verdict is wrong."""
  best = float('inf')
  for _ in range(3):
    began = time.perf_counter()
    found = verifier.submit([Sample(text, answer) for text in texts]).result()
    best = min(best, time.perf_counter() - began)
    if [verdict.right for verdict in found] != [i % 2 == 0 for i in range(len(texts))]:
      raise SystemExit(f'{answer!r}: a verdict is wrong')
  return len(texts) / best


def main() -> None:
  """Prints the table and the JSON line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--count', type=int, default=20_000)
  parser.add_argument('--characters', type=int, default=2000)
  parser.add_argument('--workers', type=int, default=2)
  known = parser.parse_args()
  cases = {'aime_short': ('aime', known.count, 40)}
  cases |= {rule: (rule, known.count, known.characters) for rule in ANSWERS}
  for name in ('math', 'math_integer'):
    cases[name] = (name, known.count // 10, known.characters)
  found = {}
  print(f'{"verifier":>12}  {"characters":>10}  {"answers/s":>12}')
  for name, (rule, count, characters) in cases.items():
    answer, right, wrong = ANSWERS[rule]
    texts = responses(right, wrong, count, characters)
    k = {'workers': known.workers, 'deadline': 10.0, 'batch_deadline': 3600.0}
    k['rule'] = rule.partition('_')[0]
    verifier = Verifier(Verification.model_validate(k))
    few = texts[:20]
    verifier.submit(
      [Sample(text, answer) for text in few]
    ).result()  # starts the processes
    found[name] = rate(verifier, answer, texts)
    verifier.close()
    print(f'{name:>12}  {characters:>10}  {found[name]:>12.0f}', flush=True)
  print(json.dumps(found))


if __name__ == '__main__':
  main()
