"""Problems from a user's jsonl file: one object a line, fields problem and answer."""

import json
import os


def read(path: str) -> list[dict[str, str]]:
  """Rows with `problem` and `answer`.

  Raises:
    ValueError: no such file, or a row that lacks a field; names file, row and field.
  """
  if not os.path.isfile(path):
    raise ValueError(
      f'problems: no file {path!r}; put the data set there or set problems.source and '
      'problems.test_source to your own jsonl files'
    )
  rows = []
  with open(path) as lines:
    for i, line in enumerate(lines, 1):
      try:
        row = json.loads(line)
      except json.JSONDecodeError as error:
        raise ValueError(f'{path}, line {i}: not JSON ({error})') from error
      if not isinstance(row, dict):
        raise ValueError(f'{path}, line {i}: {line.strip()[:40]} is no JSON object')
      for field in ('problem', 'answer'):
        if field not in row:
          raise ValueError(f'{path}, line {i}: no field {field!r}, only {sorted(row)}')
      rows.append({'problem': row['problem'], 'answer': str(row['answer'])})
  if not rows:
    raise ValueError(f'{path} holds no problem')
  return rows
