"""Chat templates, rendered in a process that a template cannot outlive or outgrow.

1. `render` sends template and messages to a process and takes the prompts back;
   `ending` asks for what stands after an answer;
2. `main`, in that process, limits its own time and memory before it renders.

A chat template is a program that came with a model. The sandbox that transformers
renders it in keeps it from files and objects, and not from loops that never end.
"""

import json
import math
import os
import pathlib
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

Content = str | list[dict[str, str]]  # of a message: a text, or texts and pictures
Conversation = Sequence[Mapping[str, Content]]
# Processor time, which a busy machine does not shorten; a prompt takes 0.1 to 1 ms.
SECONDS, PROMPTS_PER_SECOND = 3, 200
MEMORY = 400 << 20  # bytes beyond what the process has when it begins
WALL = 600  # seconds; for a process that neither computes nor ends


def render(
  template: str,
  special_tokens: dict[str, str],
  messages: Sequence[Content],
  systems: Sequence[str] = (),
) -> list[str]:
  """The prompt of each message of a user, with the generation prompt after it.

  Args:
    template: Jinja, as transformers' apply_chat_template reads it.
    special_tokens: name -> token, as the template sees them.
    systems: the system message before each, '' for none; () for none at all.

  Raises:
    ValueError: the template fails, leaves a system message out, or takes too much time
      or memory.
  """
  systems = systems or [''] * len(messages)
  conversations = [
    [{'role': 'system', 'content': system}] * bool(system)
    + [{'role': 'user', 'content': message}]
    for system, message in zip(systems, messages, strict=True)
  ]
  prompts = _rendered(template, special_tokens, conversations, answered=False)
  for system, prompt in zip(systems, prompts, strict=True):
    if system.strip() not in prompt:
      raise ValueError(f'it leaves out the system message {system[:60]!r}')
  return prompts


def ending(template: str, special_tokens: dict[str, str]) -> str:
  """What stands after an answer of the assistant, '' where the template shows none.

  Raises:
    ValueError: as `render`.
  """
  answer = 'forty-two'
  exchange = [
    {'role': 'user', 'content': 'six times seven'},
    {'role': 'assistant', 'content': answer},
  ]
  (text,) = _rendered(template, special_tokens, [exchange], answered=True)
  return text.rpartition(answer)[2] if answer in text else ''


def _rendered(
  template: str,
  special_tokens: dict[str, str],
  conversations: Sequence[Conversation],
  *,
  answered: bool,
) -> list[str]:
  """Each conversation as text; unless it is answered, with a generation prompt.

  Raises:
    ValueError: the template fails, or takes too much time or memory.
  """
  limit = SECONDS + len(conversations) // PROMPTS_PER_SECOND
  request = json.dumps(
    [limit, template, special_tokens, conversations, not answered], default=str
  )
  root = str(pathlib.Path(__file__).parents[2])
  path = os.pathsep.join([root, os.environ.get('PYTHONPATH', '')]).rstrip(os.pathsep)
  try:
    done = subprocess.run(
      [sys.executable, '-m', __name__],
      input=request.encode(),
      capture_output=True,
      timeout=WALL,
      env=os.environ | {'PYTHONPATH': path},
    )
  except subprocess.TimeoutExpired:
    raise ValueError(f'it does not end within {WALL} seconds') from None
  if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
    raise ValueError(f'it does not end within {limit} seconds of processor time')
  try:
    prompts, error = json.loads(done.stdout)
  except ValueError:
    prompts, error = None, f'its process ended with status {done.returncode}'
  if prompts is None:
    raise ValueError(error)
  return prompts


def main() -> None:
  """Reads a request from standard input, writes [prompts, error], one of them null."""
  from transformers.utils import chat_template_utils

  request = sys.stdin.buffer.read()
  limit, template, special_tokens, conversations, generation = json.loads(request)
  _restrict(limit, MEMORY + 50 * len(request))
  try:
    prompts, _ = chat_template_utils.render_jinja_template(
      conversations=conversations,
      chat_template=template,
      add_generation_prompt=generation,
      **special_tokens,
    )
    reply = json.dumps([prompts, None])
  except MemoryError:
    reply = json.dumps([None, 'it takes too much memory'])
  except RecursionError:
    reply = json.dumps([None, 'it calls itself without end'])
  except Exception as error:  # a template may raise anything
    text = ' '.join(f'{type(error).__name__}: {error}'.split())
    reply = json.dumps([None, text[:200]])
  sys.stdout.write(reply)


def _restrict(seconds: int, memory: int) -> None:
  """Limits this process to so much more processor time and memory than it has used."""
  used = resource.getrusage(resource.RUSAGE_SELF)
  total = math.ceil(used.ru_utime + used.ru_stime) + seconds
  resource.setrlimit(resource.RLIMIT_CPU, (total, total + 1))
  try:
    with open('/proc/self/statm') as file:
      pages = int(file.read().split()[0])
  except OSError:  # a system that does not enforce a limit of the address space
    return
  most = pages * resource.getpagesize() + memory
  resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == '__main__':
  main()
