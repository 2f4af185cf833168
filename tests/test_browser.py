"""The browser of the tests: what it shows of a page, and that it notices faults."""

import pathlib

PAGE = """<!doctype html><html><head><meta charset="utf-8"><title>One</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">
<style>p { color: black } @media (prefers-color-scheme: dark) { p { color: white } }
</style></head><body><p>é</p>%s</body></html>"""


def written(path: pathlib.Path, body: str = '') -> pathlib.Path:
  (path / 'page.html').write_text(PAGE % body, encoding='utf-8')
  return path / 'page.html'


def test_a_page_is_loaded_at_a_size_in_light_or_dark(browser, tmp_path):
  path = written(tmp_path)
  colour = "getComputedStyle(document.querySelector('p')).color"
  with browser.open(path, width=390, fragment='x=1') as page:
    assert page.evaluate('[document.title, innerWidth, location.hash]') == [
      'One',
      390,
      '#x=1',
    ]
    assert page.evaluate('Promise.resolve(document.body.textContent)') == 'é'
    assert page.evaluate(colour) == 'rgb(0, 0, 0)'
    page.screenshot(tmp_path / 'page.png', whole=True)
    assert (tmp_path / 'page.png').read_bytes().startswith(b'\x89PNG')
    assert page.requests == page.errors == []
  with browser.open(path, dark=True) as page:
    assert page.evaluate(colour) == 'rgb(255, 255, 255)'


def test_a_request_an_exception_and_a_warning_are_noticed(browser, tmp_path):
  body = '<img src="https://example.org/a.png"><script>console.warn("w"); f()</script>'
  with browser.open(written(tmp_path, body)) as page:
    assert page.requests == ['https://example.org/a.png']
    first, second, third = sorted(page.errors)
    assert 'net::ERR_NAME_NOT_RESOLVED' in first
    assert 'f is not defined' in second
    assert third == 'w'
