"""The look of the HTML pages: light and dark, one column on a phone.

A page is one file: it contains its style, script and figures, and loads no other file.

The script only adds comfort: under the pointer or a finger, a chart shows the values of
the nearest step, which every strip names in its <title> anyway; a button of the legend
hides a group.
"""

from collections.abc import Iterable
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from bapo_jax.runtime.html import element

# Nothing may be fetched, even if a text of a model slipped through the escaping. The
# text is also the mark by which a page of ours is known (`files.check_ours`).
POLICY = (
  "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
  "script-src 'unsafe-inline'"
)
# One colour per metric of a chart, or per group of runs; both sets have a contrast of
# at least 3 with their backgrounds.
LIGHT = ('#0072b2', '#c84e00', '#00805d', '#b0528f', '#8a6d00', '#3d6fd1', '#6b4fb3')
LIGHT += ('#5c5c5c',)
DARK = ('#5ab4f0', '#ff9457', '#3fd0a4', '#ee9fcf', '#e6c34a', '#9db8ff', '#c3a6ff')
DARK += ('#b8b8b8',)

STYLE = """
:root { --back: #fff; --card: #f6f7f8; --line: #d9dde1; --text: #1b1f23;
  --soft: #59626b; --right: #00704f; --wrong: #b3400e; --mark: #ffe3a3; %s }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --card: #1d2226;
  --line: #363d44; --text: #e6e9ec; --soft: #a0a9b2; --right: #4fd6ab;
  --wrong: #ff9c6b; --mark: #6b5316; %s } }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100%% }
body { margin: 0; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 60px }
h1 { font-size: 26px; line-height: 1.25; margin: 8px 0 4px; overflow-wrap: anywhere }
h2 { font-size: 19px; margin: 38px 0 8px; padding-top: 10px;
  border-top: 1px solid var(--line) }
h3 { font-size: 15px; margin: 16px 0 4px }
p { margin: 6px 0; max-width: 78ch }
.soft, figure output, .empty { color: var(--soft); font-size: 13px }
.tiles { display: grid; gap: 12px; margin: 16px 0;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)) }
.tile { background: var(--card); border-radius: 8px; padding: 10px 14px }
.tile b { display: block; font-size: 22px; font-variant-numeric: tabular-nums }
.tile small { color: var(--soft); display: block }
.charts { display: grid; gap: 16px; grid-template-columns:
  repeat(auto-fill, minmax(min(100%%, 340px), 1fr)) }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: 10px 12px 6px;
  min-width: 0 }
figcaption { display: flex; flex-wrap: wrap; gap: 0 12px; align-items: baseline }
figcaption span { font-size: 12px; white-space: nowrap }
figure output { display: block; min-height: 20px; font-variant-numeric: tabular-nums }
figure .empty { padding: 60px 0; text-align: center; max-width: none }
svg { display: block; width: 100%%; height: auto; touch-action: pan-y }
svg text { font-size: 11.5px; fill: var(--soft); font-variant-numeric: tabular-nums }
svg path { fill: none; stroke: currentColor; stroke-linejoin: round }
svg circle { fill: currentColor }
.grid { stroke: var(--line) }
.cursor { stroke: var(--soft); visibility: hidden }
.hit { fill: transparent }
.bold { stroke-width: 2 }
.pale { stroke-width: 1; opacity: .4 }
.bar { stroke-width: 1.4; opacity: .7 }
.dashed .bold { stroke-dasharray: 5 4 }
line.level { stroke: var(--text); stroke-dasharray: 3 3 }
.key { display: inline-block; width: 16px; height: 0; margin-right: 5px;
  vertical-align: 4px; border-top: 3px solid currentColor }
.key.dashed { border-top-style: dashed }
.key.level { border-top: 2px dotted var(--text) }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  background: currentColor; margin-right: 6px; vertical-align: -1px }
.legend { display: flex; flex-wrap: wrap; gap: 8px; position: sticky; top: 0;
  background: var(--back); padding: 8px 0; z-index: 1 }
.legend button { font: inherit; font-size: 13px; color: var(--text); cursor: pointer;
  background: var(--card); border: 1px solid var(--line); border-radius: 16px;
  padding: 3px 12px; text-align: left; overflow-wrap: anywhere }
.legend button[aria-pressed=false] { opacity: .45; text-decoration: line-through }
.scroll { overflow-x: auto; margin: 10px 0 }
table { border-collapse: collapse; font-size: 13.5px }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; font-variant-numeric: tabular-nums }
th { color: var(--soft); font-weight: 600 }
.l { text-align: left } .r { text-align: right }
td.l { overflow-wrap: anywhere; min-width: 100px }
td.r { white-space: nowrap }
td code { white-space: nowrap }
code, pre { font: 12.5px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace }
pre { background: var(--card); border-radius: 6px; padding: 8px 10px;
  margin: 4px 0 10px; white-space: pre-wrap; overflow-wrap: anywhere }
details { border: 1px solid var(--line); border-radius: 8px; margin: 10px 0;
  padding: 0 12px }
summary { cursor: pointer; padding: 8px 0; font-weight: 600 }
.pair { display: grid; gap: 0 16px; grid-template-columns:
  repeat(auto-fit, minmax(min(100%%, 420px), 1fr)) }
.right { color: var(--right); font-weight: 600 }
.wrong { color: var(--wrong); font-weight: 600 }
pre i { opacity: .6 }
pre.of-right { border-left: 3px solid var(--right) }
pre.of-wrong { border-left: 3px solid var(--wrong) }
mark { background: var(--mark); color: inherit; border-radius: 2px }
img { max-width: 100%%; max-height: 260px; border-radius: 6px }
%s
@media (max-width: 600px) { main { padding: 10px 12px 40px } h1 { font-size: 22px }
  .charts { grid-template-columns: 1fr } .tile b { font-size: 18px }
  .meanings tr { display: grid; gap: 0 12px; padding: 5px 0;
    grid-template-columns: minmax(0, 2fr) minmax(0, 1fr) minmax(0, 1fr);
    border-bottom: 1px solid var(--line) }
  .meanings :is(th, td) { border: 0; padding: 0; min-width: 0 }
  .meanings code { white-space: normal; overflow-wrap: anywhere }
  .meanings td:last-child { grid-column: 1 / -1; color: var(--soft) }
  .meanings th:last-child { display: none } }
"""

SCRIPT = """
for (const figure of document.querySelectorAll('figure')) {
  const svg = figure.querySelector('svg');
  if (!svg) continue;
  const output = figure.querySelector('output'), unit = output.textContent;
  const cursor = svg.querySelector('.cursor');
  const show = event => {
    const strip = event.target.closest('.hit');
    if (!strip) return;
    output.textContent = strip.textContent;
    for (const end of ['x1', 'x2']) cursor.setAttribute(end, strip.dataset.x);
    cursor.style.visibility = 'visible';
  };
  svg.addEventListener('pointermove', show);
  svg.addEventListener('pointerdown', show);
  svg.addEventListener('pointerleave', event => {
    if (event.pointerType !== 'mouse') return;
    output.textContent = unit;
    cursor.style.visibility = 'hidden';
  });
}
for (const button of document.querySelectorAll('.legend button'))
  button.addEventListener('click', () => {
    const shown = button.getAttribute('aria-pressed') !== 'true';
    button.setAttribute('aria-pressed', shown);
    for (const curve of document.querySelectorAll('.curve.' + button.dataset.group))
      curve.style.display = shown ? '' : 'none';
  });
"""


def document(title: str, body: Iterable[Element]) -> str:
  """Returns the text of a page in this look."""
  light, dark = (
    ' '.join(f'--c{i}: {colour};' for i, colour in enumerate(colours))
    for colours in (LIGHT, DARK)
  )
  classes = '\n'.join(f'.c{i} {{ color: var(--c{i}) }}' for i in range(len(LIGHT)))
  # Trusted texts, which `element` would escape.
  style = Element('style')
  style.text = STYLE % (light, dark, classes)
  script = Element('script')
  script.text = SCRIPT
  head = element(
    'head',
    element('meta', charset='utf-8'),
    element('meta', name='viewport', content='width=device-width, initial-scale=1'),
    Element('meta', {'http-equiv': 'Content-Security-Policy', 'content': POLICY}),
    element('meta', name='color-scheme', content='light dark'),
    element('link', rel='icon', href='data:,'),  # else browsers ask for favicon.ico
    element('title', title),
    style,
  )
  body = element('body', element('main', *body), script)
  text = ElementTree.tostring(
    element('html', head, body, lang='en'), encoding='unicode', method='html'
  )
  return f'<!doctype html>\n{text}\n'
