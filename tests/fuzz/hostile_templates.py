"""Seeded chat templates that try to hang, to fill memory or to leave the sandbox."""

from __future__ import annotations

import random

DOUBLE = (
    "{%% set ns = namespace(a=%s, b=%s) %%}{%% for i in range(%d) %%}"
    "{%% set ns.a = %s %%}{%% set ns.b = %s %%}{%% endfor %%}%s"
)
SEEDS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 'a' * 99999999999 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%(a)s' * 100000 % {'a': 'b' * 10000} }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{0:{1}}'.format(1, 999999999) }}",
    "{{ ''.join(['a' * 1000000] * 1000000) }}",
    "{{ 'a'.center(999999999) }}",
    "{{ ('a' * 1000000) | wordwrap(1) }}",
    "{{ [[1] * 100000] * 100000 }}",
    "{{ range(99999) | list | sum(start=[]) }}",
    "{{ (1).to_bytes(999999999, 'big') }}",
    "{{ 'a'.replace('', 'b' * 1000000).replace('', 'c' * 1000000) }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ ('a' * 1000000) | urlize }}",
    "{{ 'x'.translate({120: 'y' * 4000000}) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ lipsum(n=100000) }}",
    "{% include 'x' %}",
    "{% extends 'x' %}",
    "{% import 'x' as y %}",
    "{{ messages | groupby('role') | map('list') | list }}",
    "{{ dict(a=1).update(b=2) }}",
    "{{ messages.append(1) }}",
    "{% set x = [1] %}{% for i in x %}{% set _ = x.append(1) %}{% endfor %}",
    "{{ 'a' ~ ('b' * 4000000) ~ ('c' * 4000000) ~ ('d' * 4000000) }}",
    "{{ (range(99999) | list) | batch(1) | list | slice(99999) | list | length }}",
    "{{ ('a,' * 1000000).split(',') | sort | unique | join(',') | length }}",
    "{{ ('a' * 1000000) | indent(100000) }}",
    "{{ ('a\\n' * 1000000) | indent(16, true) | indent(16, true) | length }}",
    "{{ ('a' * 100000).splitlines() | map('upper') | list }}",
    "{{ ('a' * 1000000) | striptags | escape | e | e | e | e }}",
    "{{ ('<' * 1000000) | e | e | e | e | e | length }}",
    "{{ ('&' * 500000) | escape | forceescape | length }}",
    "{{ 1e308 * 1e308 }}{{ (1e308 | int) * (1e308 | int) * (1e308 | int) }}",
    "{{ (10 ** 4000) | string | int }}",
    "{{ ('9' * 4000000) | int }}",
    "{{ ('9' * 100000) | int * ('9' * 100000) | int }}",
    "{{ '1' * 4000 | int }}",
    "{% filter upper | upper | upper %}{{ 'a' * 4000000 }}{% endfilter %}",
    "{% set x %}{{ 'a' * 4000000 }}{% endset %}{% set y %}{{ x }}{{ x }}{% endset %}{{ y }}",
    "{% for a in 'aaaaaaaaaaaaaaaa' recursive %}{{ loop('aaaaaaaaaaaaaaaa') }}{% endfor %}",
    "{{ namespace(a=1).__setattr__ }}",
    "{{ joiner.__call__.__func__.__code__ }}",
    "{{ ('a' * 2000000 + 'b') is in('a' * 2000000) }}",
    "{{ ('a' * 1000000).count('a' * 500000 + 'b') }}",
    "{{ ('ab' * 1000000).find('ab' * 300000 + 'c') }}",
    "{% call(x) f() %}{% endcall %}",
    "{{ {{{{{{{{",
    "{%" * 1000,
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{{ " + "-" * 20000 + "1 }}",
    "{{ 1" + " + 1" * 20000 + " }}",
    "{{ [" * 2000 + "]" * 2000 + " }}",
    "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "{% for i in [1] %}" * 30 + "a" + "{% endfor %}" * 30,
    "a" * 250_000,
    "{{ a }}" * 30_000,
]
ENDS = [
    "{{ ns.a == ns.b }}",
    "{{ ns.a < ns.b }}",
    "{{ ns.a in ns.b }}",
    "{{ ns.a }}",
    "{{ ns.a | length }}",
    "{{ ns.a | tojson }}",
    "{{ ns.a | string | length }}",
    "{{ ns.a | list | sort | length }}",
    "{{ [ns.a] | unique | list }}",
    "{{ ns.a.index(1) }}",
    "{{ ns.a.count(ns.b) }}",
    "{{ ns.a | first == ns.b | last }}",
    "{{ [ns.a, ns.b] | max }}",
    "{{ [ns.a] | groupby(0) | list }}",
    "{{ ns.a | sum }}",
    "{{ '%s' % ns.a }}",
    "{{ '{}'.format(ns.a) }}",
    "{{ ns.a ~ ns.b }}",
    "{{ ns.a is eq ns.b }}",
    "{{ ns.a is in ns.b }}",
    "{{ [ns.a] | select('eq', ns.b) | list }}",
    "{{ [ns.a] | reject('in', ns.b) | list }}",
    "{{ ns.a | join | length }}",
    "{{ ns.a | reverse | list }}",
    "{{ {ns.a: 1} }}",
    "{{ dict(x=ns.a) == dict(x=ns.b) }}",
    "{{ dict(x=ns.a) | dictsort }}",
    "{{ [ns.a] | map('string') | list }}",
    "{{ ns.a | pprint }}",
    "{{ ns.a | escape }}",
    "{{ ns.a | trim }}",
    "{{ {}[ns.a] }}",
    "{{ dict(x=ns.a).items() }}",
    "{{ dict(x=ns.a).values() | string }}",
    "{{ namespace(x=ns.a) }}",
    "{{ namespace(x=ns.a) == namespace(x=ns.b) }}",
    "{{ {'x': 1}.get(ns.a) }}",
    "{{ messages[ns.a] }}",
]
STARTS = ["[]", "''", "'ab'", "()", "{}", "[1]", "'a\\n'", "1", "1.5"]
GROWS = [
    "[{0}, {0}]",
    "{0} + {0}",
    "({0}, {0})",
    "{{'x': {0}, 'y': {0}}}",
    "{0} ~ {0}",
    "{0} * 2",
    "[{0}] * 100",
    "{0} | list + {0} | list",
    "{0} | string * 3",
    "{0} | tojson",
    "{0} | join({0} | string)",
    "{0} | e",
    "{0} | replace('a', 'aa')",
    "{0} ~ '%s%s' % ({0}, {0})",
    "namespace(p={0}, q={0})",
    "{0} | indent(8)",
    "{0} * {0}",
    "{0} ** 2",
    "'{{0}}{{0}}'.format({0})",
    "{0} | urlencode",
    "dict(a={0}, **dict(b={0}))",
]
ATOMS = [
    "'a' * 4000000",
    "'<' * 1000000",
    "range(99999)",
    "range(99999) | list",
    "messages",
    "messages * 90000",
    "10 ** 300",
    "1e308",
    "'9' * 4000",
    "'a b ' * 100000",
    "'%s' * 1000",
    "[[]] * 99999",
    "none",
    "true",
    "-1",
    "99999",
    "2 ** 31",
    "{'a': 'b' * 1000000}",
    "'a\\n' * 500000",
    "namespace()",
    "cycler(1, 2)",
    "joiner(',')",
    "loop",
    "self",
    "dict",
]
FILTERS = [
    "abs",
    "attr('x')",
    "batch(3)",
    "batch(1, 'x')",
    "capitalize",
    "center(90000)",
    "default('a')",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format(1)",
    "groupby('a')",
    "indent(90000)",
    "int",
    "items",
    "join('ab')",
    "last",
    "length",
    "list",
    "lower",
    "map('upper')",
    "map(attribute='a')",
    "max",
    "min",
    "pprint",
    "random",
    "reject",
    "rejectattr('a')",
    "replace('a', 'b' * 1000)",
    "replace('', 'b')",
    "reverse",
    "round(400)",
    "safe",
    "select",
    "selectattr('a')",
    "slice(90000)",
    "sort",
    "sort(reverse=true)",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "tojson(indent=16)",
    "trim",
    "truncate(90000)",
    "unique",
    "upper",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap(1)",
    "xmlattr",
]
METHODS = [
    ".split('a')",
    ".split()",
    ".rsplit()",
    ".splitlines()",
    ".join(['a'] * 99999)",
    ".replace('a', 'b' * 9999)",
    ".zfill(99999)",
    ".ljust(99999)",
    ".expandtabs(99999)",
    ".format(1, 2)",
    ".format_map({})",
    ".encode()",
    ".translate({97: 'b' * 9999})",
    ".partition('a')",
    ".title()",
    ".swapcase()",
    ".casefold()",
    ".items()",
    ".keys()",
    ".values()",
    ".get('a')",
    ".copy()",
    ".count('a')",
    ".index('a')",
    ".find('aaab')",
    ".startswith('a')",
    ".__class__",
    ".__len__()",
    "[0]",
    "[-1]",
    "[::2]",
    "[::-1]",
    "[0:99999]",
    "['a']",
    ".a.b.c",
    "()",
    "(1)",
    "(*range(99999))",
    "(**{'a': 1})",
    ".as_integer_ratio()",
    ".bit_length()",
    ".hex()",
]
OPERATORS = [
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "**",
    "~",
    "==",
    "!=",
    "<",
    ">=",
    "in",
    "not in",
    "and",
    "or",
    "is eq",
    "is in",
]


def template(case: int, seed: int = 0) -> str:
    """The template of a case: a known bomb, a value that doubles, or a random program."""
    if case < len(SEEDS):
        return SEEDS[case]
    rng = random.Random(f"{seed}/{case}")
    match rng.randrange(4):
        case 0 | 1:
            grow = rng.choice(GROWS)
            first, second = (rng.choice(STARTS) for _ in range(2))
            values = (grow.format("ns.a"), rng.choice([grow, rng.choice(GROWS)]).format("ns.b"))
            return DOUBLE % (
                first,
                rng.choice([first, second]),
                rng.choice([5, 12, 24, 40, 1000]),
                *values,
                rng.choice(ENDS),
            )
        case _:
            return "".join(_statement(rng, 0) for _ in range(rng.randint(1, 4)))


def _expression(rng: random.Random, depth: int) -> str:
    if depth > 4 or rng.random() < 0.25:
        return rng.choice(ATOMS)
    inner = _expression(rng, depth + 1)
    match rng.randrange(5):
        case 0 | 1:
            return f"({inner}) | {rng.choice(FILTERS)}"
        case 2:
            return f"({inner}){rng.choice(METHODS)}"
        case 3:
            return f"({inner}) {rng.choice(OPERATORS)} ({_expression(rng, depth + 1)})"
        case _:
            return f"[{inner}, {_expression(rng, depth + 1)}]"


def _statement(rng: random.Random, depth: int) -> str:
    value = _expression(rng, 0)
    inside = _statement(rng, depth + 1) if depth < 4 else "x"
    match rng.randrange(6):
        case 0:
            return f"{{% for x in {value} %}}{inside}{{% endfor %}}"
        case 1:
            return f"{{% set x = {value} %}}{inside}{{{{ x }}}}"
        case 2:
            return f"{{% if {value} %}}{inside}{{% endif %}}"
        case 3:
            return f"{{% macro f(x) %}}{inside}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f({value}) }}}}"
        case 4:
            return f"{{% filter {rng.choice(FILTERS)} %}}{inside}{{% endfilter %}}"
        case _:
            return f"{{{{ {value} }}}}"
