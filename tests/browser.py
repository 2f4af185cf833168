"""A headless Chromium for tests of HTML pages, over the DevTools protocol.

Chromium reads commands from file descriptor 3 and writes answers and events to 4, as
JSON texts that end in a zero byte (--remote-debugging-pipe), so no package is needed.

  def test_page(browser, tmp_path):
    with browser.open(tmp_path / 'page.html', width=390) as page:
      assert page.evaluate('document.title') == 'Run 3'
      assert page.requests == page.errors == []
"""

import contextlib
import itertools
import json
import os
import pathlib
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')
OPTIONS = (
  '--headless=new',
  '--no-sandbox',
  '--disable-gpu',
  '--disable-dev-shm-usage',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-extensions',
  '--hide-scrollbars',
  '--remote-debugging-pipe',
)
# No name resolves: a page that needs the network fails here, too.
OFFLINE = '--host-resolver-rules=MAP * ~NOTFOUND'
LIMIT_S = 60.0  # for one answer; a busy machine starts Chromium in ten seconds


class Browser:
  """A Chromium process; `open` loads a file into a new tab."""

  def __init__(self, profile: pathlib.Path):
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
      pytest.skip(f'no browser found: install one of {", ".join(NAMES)}')
    commands_out, self._commands = os.pipe()
    self._answers, answers_in = os.pipe()
    redirect = f'exec "$0" "$@" 3<&{commands_out} 4>&{answers_in}'
    arguments = [program, *OPTIONS, OFFLINE, f'--user-data-dir={profile}']
    self._process = subprocess.Popen(
      ['bash', '-c', redirect, *arguments, 'about:blank'],
      pass_fds=(commands_out, answers_in),
      stderr=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
    )
    os.close(commands_out)
    os.close(answers_in)
    self._bytes = b''
    self._ids = itertools.count(1)
    self._events: list[dict[str, Any]] = []

  def close(self) -> None:
    """Ends the process."""
    os.close(self._commands)  # Chromium exits when the pipe closes
    os.close(self._answers)
    try:
      self._process.wait(10)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()

  def call(self, method: str, session: str | None = None, **params: Any) -> dict:
    """Sends a command; returns its result, and keeps the events that came before it.

    Raises:
      RuntimeError: Chromium refused the command, or closed the pipe.
      TimeoutError: no answer within LIMIT_S seconds.
    """
    number = next(self._ids)
    message: dict[str, Any] = {'id': number, 'method': method, 'params': params}
    if session is not None:
      message['sessionId'] = session
    os.write(self._commands, json.dumps(message).encode() + b'\0')
    deadline = time.monotonic() + LIMIT_S
    while True:
      answer = self._receive(deadline)
      if answer.get('id') == number:
        if 'error' in answer:
          raise RuntimeError(f'{method}: {answer["error"]["message"]}')
        return answer['result']
      self._events.append(answer)

  def events(self, session: str) -> list[dict[str, Any]]:
    """Returns the events of a tab so far, oldest first."""
    return [e for e in self._events if e.get('sessionId') == session]

  def wait(self, session: str, method: str) -> None:
    """Waits until the tab reports the event; TimeoutError after LIMIT_S seconds."""
    deadline = time.monotonic() + LIMIT_S
    while all(event['method'] != method for event in self.events(session)):
      self._events.append(self._receive(deadline))

  def _receive(self, deadline: float) -> dict[str, Any]:
    while b'\0' not in self._bytes:
      ready, _, _ = select.select(
        [self._answers], [], [], max(0.0, deadline - time.monotonic())
      )
      if not ready:
        raise TimeoutError(f'Chromium is silent for {LIMIT_S:.0f} s')
      part = os.read(self._answers, 1 << 20)
      if not part:
        raise RuntimeError('Chromium closed its pipe')
      self._bytes += part
    text, _, self._bytes = self._bytes.partition(b'\0')
    return json.loads(text)

  @contextlib.contextmanager
  def open(
    self,
    path: str | os.PathLike[str],
    width: int = 1280,
    height: int = 900,
    *,
    fragment: str = '',
    touch: bool = False,
  ) -> Iterator['Page']:
    """Loads a file into a new tab of this size; waits until it has loaded.

    `fragment` is the part of the address after '#'.
    """
    target = self.call('Target.createTarget', url='about:blank')['targetId']
    attached = self.call('Target.attachToTarget', targetId=target, flatten=True)
    session = attached['sessionId']
    for domain in ('Page', 'Runtime', 'Network', 'Log'):
      self.call(f'{domain}.enable', session)
    metrics = {'width': width, 'height': height, 'deviceScaleFactor': 1}
    self.call('Emulation.setDeviceMetricsOverride', session, **metrics, mobile=touch)
    uri = pathlib.Path(path).resolve().as_uri()
    self._events.clear()
    url = f'{uri}#{fragment}' if fragment else uri
    self.call('Page.navigate', session, url=url)
    self.wait(session, 'Page.loadEventFired')
    try:
      yield Page(self, session, uri)
    finally:
      self.call('Target.closeTarget', targetId=target)


class Page:
  """A tab that has loaded a file."""

  def __init__(self, browser: Browser, session: str, uri: str):
    self._browser, self._session, self._uri = browser, session, uri

  def evaluate(self, expression: str) -> Any:
    """Returns the value of a JavaScript expression as JSON; waits for a promise.

    Raises:
      RuntimeError: the expression threw an exception.
    """
    options = {'returnByValue': True, 'awaitPromise': True}
    answer = self._browser.call(
      'Runtime.evaluate', self._session, expression=expression, **options
    )
    if 'exceptionDetails' in answer:
      raise RuntimeError(_described(answer['exceptionDetails']))
    return answer['result'].get('value')

  def emulate(self, **options: Any) -> None:
    """Sets the medium and its features, such as media='print'."""
    self._browser.call('Emulation.setEmulatedMedia', self._session, **options)

  @property
  def requests(self) -> list[str]:
    """The addresses that the page asked for, except itself and data: addresses."""
    self.evaluate('0')  # an answer comes after the events before it
    found = self._browser.events(self._session)
    sent = [e for e in found if e['method'] == 'Network.requestWillBeSent']
    urls = [event['params']['request']['url'].partition('#')[0] for event in sent]
    return [url for url in urls if url != self._uri and not url.startswith('data:')]

  @property
  def errors(self) -> list[str]:
    """The errors and warnings of the console, and the uncaught exceptions."""
    self.evaluate('0')
    bad, found = ('error', 'warning', 'assert'), []
    for event in self._browser.events(self._session):
      params, method = event['params'], event['method']
      if method == 'Runtime.exceptionThrown':
        found.append(_described(params['exceptionDetails']))
      elif method == 'Runtime.consoleAPICalled' and params['type'] in bad:
        found.append(' '.join(str(arg.get('value')) for arg in params['args']))
      elif method == 'Log.entryAdded' and params['entry']['level'] in bad:
        found.append(params['entry']['text'])
    return found


def _described(details: dict[str, Any]) -> str:
  exception = details.get('exception', {})
  return exception.get('description') or details['text']
