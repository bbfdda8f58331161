"""Markdown of answers: rendered in a real browser, never as HTML of the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from page_driver import chromium, needs_chromium, open_page
from serving import RunningServer

pytestmark = needs_chromium
RENDER = """async (texts) => {
  const { renderMarkdown } = await import('/page/markdown.js');
  const target = document.createElement('div');
  for (const text of texts) renderMarkdown(target, text);
  const other = / (target|rel|tabindex|role|aria-level)="[^"]*"/g;
  return target.innerHTML.replace(/<button.*?<\\/button>/g, '').replace(other, '');
}"""


@pytest.fixture(scope="module")
def page(server: RunningServer) -> Iterator[Any]:
    with chromium() as browser, open_page(browser, server) as opened:
        yield opened


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("**a** __b__ *c* _d_", "<p><strong>a</strong> <strong>b</strong> <em>c</em> <em>d</em></p>"),
        ("~~e~~", "<p><del>e</del></p>"),
        ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
        ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
        ("`a < b` and ``x ` y``", "<p><code>a &lt; b</code> and <code>x ` y</code></p>"),
        ("## Title ##\ntext", '<p class="heading h2">Title</p><p>text</p>'),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
        ("1. a\n\n2. b", '<ol start="1"><li>a</li><li>b</li></ol>'),
        ("- [x] done\n- [ ] open", "<ul><li><span>☑ </span>done</li><li><span>☐ </span>open</li></ul>"),
        ("> a\n> b", "<blockquote><p>a<br>b</p></blockquote>"),
        ("---", "<hr>"),
        ("[t](https://e.org/a_(b)) <https://e.org>", '<p><a href="https://e.org/a_(b)">t</a> <a href="https://e.org">https://e.org</a></p>'),
        ("see https://e.org/x.", '<p>see <a href="https://e.org/x">https://e.org/x</a>.</p>'),
        (r"\*not\* bold", "<p>*not* bold</p>"),
        ("unclosed **bold and `code", "<p>unclosed **bold and `code</p>"),
    ],
)  # fmt: skip
def test_forms(page: Any, text: str, html: str) -> None:
    assert page.evaluate(RENDER, [text]) == html


def test_code_has_its_language_and_colours(page: Any) -> None:
    html = page.evaluate(RENDER, ["```python\ndef f():  # why\n    return '<b>'\n```\nafter"])
    assert '<div class="code-top"><span>python</span></div>' in html
    assert '<span class="code-keyword">def</span> f():  <span class="code-comment"># why</span>' in html
    assert "<span class=\"code-string\">'&lt;b&gt;'</span>" in html
    assert html.endswith("<p>after</p>")


def test_a_fence_that_is_still_open_is_code(page: Any) -> None:
    assert "<code>x = 1\n\n# not a title</code>" in page.evaluate(RENDER, ["```\nx = 1\n\n# not a title"])


def test_a_table(page: Any) -> None:
    html = page.evaluate(RENDER, ["| a | b |\n|---|--:|\n| 1 | 2 |"])
    assert '<th style="text-align: left;">a</th><th style="text-align: right;">b</th>' in html
    assert '<td style="text-align: right;">2</td>' in html


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "[x](javascript:alert(1))",
        "[x](data:text/html,<script>alert(1)</script>)",
        "![x](javascript:alert(1))",
        "```<img src=x>\n<script>alert(1)</script>\n```",
        "| <b>a</b> |\n|---|\n| <i>b</i> |",
    ],
)
def test_nothing_becomes_html_or_a_script(page: Any, text: str) -> None:
    html = page.evaluate(RENDER, [text])
    for forbidden in ("<img", "<script", "<b>", "<i>", 'href="javascript', 'href="data'):
        assert forbidden not in html


@pytest.mark.parametrize("text", ["> " * 400 + "deep", "- " * 400 + "deep", "*" * 4000, "[" * 4000, "`" * 3001 + "a"])
def test_odd_texts_do_no_harm(page: Any, text: str) -> None:
    assert page.evaluate(RENDER, [text])


def test_growing_text_ends_as_the_whole_text_does(page: Any) -> None:
    text = "# T\n\nSome *text*.\n\n1. one\n2. two\n\n```js\nlet x = 1;\n```\n\n| a |\n|---|\n| 1 |\n\nend"
    steps = [text[:end] for end in range(1, len(text) + 1)]
    assert page.evaluate(RENDER, steps) == page.evaluate(RENDER, [text])
