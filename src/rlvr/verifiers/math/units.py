"""Units of measurement and the words after a value: which can be converted, which are prose, which change the
meaning."""

# ruff: noqa: RUF001 - letters of other scripts are units here

from __future__ import annotations

import functools
import re
from fractions import Fraction

from rlvr.verifiers.math.counted import ADJECTIVES, NOUNS

_BASE = {
    "length": "1/1000 mm 毫米 мм; 1/100 cm 厘米 см センチメートル センチ 센티미터; 1/10 dm дм; "
        "1 m 米 м метр метра метров メートル 미터; 1000 km 千米 公里 км キロメートル 킬로미터; 127/5000 inch in; "
        "381/1250 ft foot feet; 1143/1250 yd yard; 201168/125 mi mile",
    "time": "1/1000 ms; 1 second sec s 秒 с сек секунда секунды секунд 초; "
        "60 minute min 分钟 мин минута минуты минут; 3600 hour hr h 小时 ч час часа часов 時間 시간; "
        "86400 day 天; 604800 week",
    "years": "1 month; 12 year yr 年; 120 decade; 1200 century centurie",
    "mass": "1/1000000 mg мг; 1/1000 g 克 г グラム 그램; 1 kg 千克 公斤 кг キログラム キロ 킬로그램; 1000 tonne 吨; "
        "45359237/1600000000 oz ounce; 45359237/100000000 lb pound",
    "volume": "1/1000 ml 毫升 мл 立方厘米; 1 l 升 л リットル; 473176473/125000000 gallon; 473176473/500000000 quart; "
        "473176473/1000000000 pint; 1000 立方米",
    "area": "316160658/78125 acre; 10000 hectare га; 1 平方米; 1/10000 平方厘米; 1000000 平方千米",
    "force": "1 Н 牛 牛顿; 1000 кН", "power": "1 Вт 瓦; 1000 кВт", "pressure": "1 Па; 1000 кПа",
    "voltage": "1 В 伏 伏特", "resistance": "1 Ом 欧姆", "energy": "523/125 cal; 4184 kcal; 1 Дж 焦耳; 1000 кДж",
    "angle": "1 degree deg", "arc": "1 radian rad", "unit length": "1 unit", "money": "1 dollar usd; 1/100 cent",
    "euro": "1 euro eur €", "yen": "1 yen", "rupee": "1 rupee rs ₹", "yuan": "1 yuan 元", "morning": "1 am a.m",
    "afternoon": "1 pm p.m",
}  # fmt: skip
"""Quantity -> sizes, each with the words of the unit of that size."""
_PREFIXES: dict[str, tuple[str, int | str]] = {
    "tera": ("T", 10**12), "giga": ("G", 10**9), "mega": ("M", 10**6), "kilo": ("k", 10**3), "hecto": ("h", 100),
    "deca": ("da", 10), "": ("", 1), "deci": ("d", "1/10"), "centi": ("c", "1/100"), "milli": ("m", "1/1000"),
    "micro": ("u", "1/1000000"), "nano": ("n", "1/1000000000"), "pico": ("p", "1/1000000000000"),
}  # fmt: skip
"""The word -> its symbol, and what it multiplies by."""
_METRIC: dict[str, tuple[str, dict[str, int | str]]] = {
    "length": ("m", {"meter": 1, "metre": 1}), "time": ("s", {"second": 1}), "mass": ("", {"gram": "1/1000"}),
    "current": ("A", {"ampere": 1, "amp": 1}), "temperature": ("K", {"kelvin": 1}), "amount": ("mol", {"mole": 1}),
    "volume": ("L l", {"liter": 1, "litre": 1}), "frequency": ("Hz", {"hertz": 1}), "force": ("N", {"newton": 1}),
    "pressure": ("Pa", {"pascal": 1}), "energy": ("J", {"joule": 1, "calorie": "523/125"}), "work": ("Wh", {}),
    "electron energy": ("eV", {}), "power": ("W", {"watt": 1}), "voltage": ("V", {"volt": 1}),
    "resistance": ("", {"ohm": 1}), "capacitance": ("", {"farad": 1}), "charge": ("", {"coulomb": 1}),
    "inductance": ("", {"henry": 1}), "flux density": ("", {"tesla": 1}), "data": ("", {"byte": 8, "bit": 1}),
}  # fmt: skip
"""Quantity -> the symbols of its units, which take the prefixes as symbols (`nm`), and their words, which take them as
words (`nanometer`), with their sizes."""
_DERIVED = {
    "frequency": {"time": -1}, "volume": {"length": 3}, "area": {"length": 2},
    "force": {"mass": 1, "length": 1, "time": -2}, "energy": {"mass": 1, "length": 2, "time": -2},
    "work": {"mass": 1, "length": 2, "time": -2}, "power": {"mass": 1, "length": 2, "time": -3},
    "pressure": {"mass": 1, "length": -1, "time": -2}, "charge": {"current": 1, "time": 1},
    "voltage": {"mass": 1, "length": 2, "time": -3, "current": -1},
    "resistance": {"mass": 1, "length": 2, "time": -3, "current": -2},
    "capacitance": {"mass": -1, "length": -2, "time": 4, "current": 2},
    "inductance": {"mass": 1, "length": 2, "time": -2, "current": -2},
    "flux density": {"mass": 1, "time": -2, "current": -1},
}  # fmt: skip
"""Quantity -> the powers of the base quantities that it is made of. Source: BIPM, The International System of Units,
9th edition, table 4."""
_SIZES = {"volume": Fraction(1, 1000), "work": Fraction(3600)}
"""The unit of a quantity in units of metre, kilogram and second, where it is not one: the litre, the watt hour."""
_UNITS = {
    prefix + symbol: (quantity, Fraction(factor))
    for quantity, (symbols, _) in _METRIC.items()
    for symbol in symbols.split()
    for prefix, factor in _PREFIXES.values()
} | {"g": ("mass", Fraction(1, 1000))}
_AMBIGUOUS = {
    "capacitance": ("F", "farad"), "charge": ("C", "coulomb"), "inductance": ("H", "henry"),
    "flux density": ("T", "tesla"), "temperature F": ("F", "degrees F"), "temperature C": ("C", "degrees C"),
}  # fmt: skip
"""Quantity -> a letter and the word of its unit; without a prefix the letter is one only beside a unit of the
quantity."""
_PREFIXED = ("capacitance", "charge", "inductance", "flux density")
_UNITS |= {
    symbol + _AMBIGUOUS[quantity][0]: (quantity, Fraction(factor))
    for quantity in _PREFIXED
    for symbol, factor in _PREFIXES.values()
    if symbol in ("m", "u", "n", "p")
}
_UNITS |= {
    prefix + name: (quantity, Fraction(size) * Fraction(factor))
    for quantity, (_, names) in _METRIC.items()
    for name, size in names.items()
    for prefix, (_, factor) in _PREFIXES.items()
}
for _quantity, _sizes in _BASE.items():
    for _size, *_words in map(str.split, _sizes.split(";")):
        _UNITS |= dict.fromkeys(_words, (_quantity, Fraction(_size)))
_UNITS |= {f"degrees {scale}": (f"temperature {scale}", Fraction(1)) for scale in "CF"}
_ALIASES = {
    "mph": "mile per hour", "kph": "km per hour", "kmh": "km per hour", "sq": "square", "cc": "cm^3", "celsius": "C",
    "Celsius": "C", "fahrenheit": "F", "Fahrenheit": "F",
}  # fmt: skip
SCALES = {
    word: Fraction(size)
    for size, words in {
        "1/100": "percent percentage pct процент процента процентов", "12": "dozen", "100": "hundred 百 백",
        "1e3": "thousand тыс тысяч тысяча тысячи ألف آلاف الف هزار हज़ार हजार 千 천",
        "1e6": "million миллион миллиона миллионов млн مليون ملايين میلیون",
        "1e9": "billion миллиард миллиарда миллиардов млрд مليار میلیارد",
        "1e12": "trillion трлн триллион триллиона триллионов 兆", "1e5": "लाख", "1e7": "करोड़", "10": "十",
        "1e4": "万 萬 만", "1e8": "亿 億 억",
    }.items()
    for word in words.split()
}  # fmt: skip
# Matches `or 3`, `more than`, `times`; not `apples`, `cm`.
_MEANINGFUL = re.compile(
    r"\b(?:or|and|not|no|maybe|perhaps|possibly|either|alternatively|unless|except|but|else|instead|rather|wrong"
    r"|incorrect|approximately|about|minus|plus|times|divided|over|squared|cubed|more|less|than|at|least|most|up"
    r"|between|half|halves|thirds?|fourths?|quarters?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?"
    r"|thousandths?|modulo|mod|fewer|greater|larger|smaller|another|twice|thrice|doubled?|tripled?|until|till|nearly"
    r"|almost|roughly|around|however|though|although|otherwise|provided|assuming|whenever|whether)\b",
    re.IGNORECASE,
)
# Matches `cm^2`, `degrees C`, `/`; not `5`.
_WORD = re.compile(r"((?:[^\W\d_]|\.)+(?: [CF]\b)?|[€₹])(?:\^\{?(-?\d))?|/|\*")
# Matches `cm long`, `liters of milk`, `the`; not `kg`.
_FILLING = re.compile(
    r"\b(?:the|(?-i:an?)|old|long|wide|tall|high|deep|away|exactly|(?:in )?total|altogether|overall|in all)\b|\bof\b.*",
    re.IGNORECASE,
)
"""Words beside a unit that say nothing of it, and what it is a measure of (`3 liters of milk`)."""
_COUNTERS = frozenset(
    """
    个 個 只 隻 本 人 名 位 张 張 条 條 件 次 种 種 倍 岁 歳 才 枚 匹 台 辆 輛 棵 朵 头 頭 双 雙 对 對 组 組 块 塊 片
    根 支 颗 粒 页 頁 题 題 道 円 圆 块钱 人民币 日 月 周 分 点 時 度 通り つ 回 개 명 원 살 마리 권 장 회 번 가지 분
    일 년 руб рубль рубля рублей день дня дней год года лет градус градуса градусов штук шт раз раза человек человека
    """.split()  # noqa: SIM905
)
"""Words of other scripts that count or measure; any other one behind a number may say something of it (`5不是答案`,
`2以上`)."""
# Matches `is extraneous`, `in base`, `rejected`; not `apples`.
_SAYS_MORE = re.compile(
    r"\b(?:is|are|was|were|be|been|has|have|had|does|do|did|can|could|will|would|should|must|may|might|fails?|works?"
    r"|holds?|satisf(?:y|ies)|in|on|at|by|from|to|with|without|for|if|when|where|which|that|this|because|since|so|too"
    r"|very|only|never|nor|both|after|before|below|above|under|extraneous|invalid|false|true|impossible|base|correct"
    r"|right|it|its|they|them|he|she|we|you|me|us|what|why|how|who|whose|zero|one|two|three|four|five|six|seven|eight"
    r"|nine|ten|eleven|twelve|twenty|hundreds|thousands|millions|dozens|first|third|fourth|fifth|here|there|then|again"
    r"|also|already|still|yet|just|even|\w{2,}ed|\w{3,}ly)\b",
    re.IGNORECASE,
)
"""Verbs, prepositions, participles, judgements, pronouns, number words, adverbs: no phrase that has one only names what
is counted, though the problem may have the word."""
_ORDINALS = frozenset(["st", "nd", "rd", "th"])
_IRREGULAR = {"people": "person", "men": "man", "women": "woman", "children": "child", "feet": "foot", "mice": "mouse"}


def changes_meaning(words: str) -> bool:
    """Return True if words after a value say something else than its unit or what it counts."""
    return _MEANINGFUL.search(words) is not None


def conversion(gold: str, answer: str, nouns: frozenset[str] = frozenset()) -> Fraction | None:
    """Return the size of the answer's unit in units of the gold's; None where they disagree. `nouns` are the words of
    the problem.

    A unit may be left out, and one may be added (see `_may_be_added`). Where both sides state one, either both are
    known, and of one dimension, or they are the same words (`3 apples`, `3 apple`).
    """
    if gold == answer or not answer:
        return Fraction(1)
    if not gold:
        if _may_be_added(answer, nouns):
            return Fraction(1)
        return None
    gold = _bare(gold)
    answer = _bare(answer)
    ours = _dimension_beside(gold, answer)
    theirs = _dimension_beside(answer, gold)
    if ours is None or theirs is None:
        if _folded(gold) == _folded(answer):
            return Fraction(1)
        return None
    if ours[0] == theirs[0]:
        return theirs[1] / ours[1]
    kinds = {power[0] for side in (ours, theirs) for power in side[0]}
    has_scale_left_out = "angle" in kinds and len(kinds) == 2 and bool(kinds & {"temperature C", "temperature F"})
    return Fraction(1) if has_scale_left_out else None


def _dimension_beside(unit: str, other: str) -> tuple[tuple[tuple[str, int], ...], Fraction] | None:
    """The dimension of a unit, in which a letter that is no unit alone is a degree beside degrees, else a farad, a
    coulomb ..."""
    own = dimension(unit)
    if own is not None:
        return own
    beside = dimension(other)
    degrees = [name for name, _ in beside[0] if name.startswith("temperature ")] if beside else []
    for quantity in degrees or _PREFIXED:
        letter, word = _AMBIGUOUS[quantity]
        unit = re.sub(rf"\b{letter}\b", word, unit)
    return dimension(unit)


def _may_be_added(unit: str, nouns: frozenset[str]) -> bool:
    """Return True if words beside a gold without a unit only name what is counted.

    They do where all of them are known: units, counters, words of the problem, common nouns (counted.py). An adjective
    stands before a noun. Words that say more (`is extraneous`, `in base 6`, `(rejected)`) never do.
    """
    unit = _bare(unit)
    if unit == "K" and nouns.isdisjoint(("kelvin", "temperature")):  # `5K` is five thousand more often
        return False
    if dimension(unit) is not None:
        return True
    words = re.findall(r"[^\W\d_]+", unit.casefold())
    if not words or unit.startswith("(") or _SAYS_MORE.search(unit) or changes_meaning(unit):
        return False
    if words[-1] in ADJECTIVES - NOUNS:
        return False
    return all(_may_count(word, nouns) for word in words)


def _may_count(word: str, nouns: frozenset[str]) -> bool:
    if word in _COUNTERS or word in ADJECTIVES or word in _ORDINALS or dimension(word) is not None:
        return True
    forms = {word, singular(word), word.removesuffix("s")}
    return word.isascii() and not (forms.isdisjoint(NOUNS) and forms.isdisjoint(nouns))


def _bare(unit: str) -> str:
    """A unit without words that say nothing of it, or as it is where nothing else is left."""
    return " ".join(_FILLING.sub(" ", unit).split()) or unit


def _folded(unit: str) -> list[str]:
    """The words of a unit in one case and number."""
    return [singular(word) for word in re.findall(r"[^\W\d_]+|\d+|[^\w\s]", unit.casefold()) if word != "."]


def singular(word: str) -> str:
    """A lower-case English word without the ending of its plural."""
    if word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "sses", "xes")):
        return word[:-2]
    return _IRREGULAR.get(word, word if word.endswith("ss") else word.removesuffix("s"))


@functools.lru_cache(maxsize=1024)
def dimension(unit: str) -> tuple[tuple[tuple[str, int], ...], Fraction] | None:
    """The powers of the dimensions of a unit, and its size in base units; None where a word of it is not known.

    Zero words are no unit: None.
    """
    powers: dict[str, int] = {}
    size = Fraction(1)
    sign = 1
    wanted = 1
    words = " ".join(_ALIASES.get(word, word) for word in unit.split())
    for match in _WORD.finditer(words.replace("degree C", "degrees C").replace("degree F", "degrees F")):
        word = match[1]
        if word in (None, "per", "a", "an"):
            sign = -1 if match[0] in ("/", "per") else sign
            continue
        if word in ("square", "cubic"):
            wanted = 2 if word == "square" else 3
            continue
        small = word.rstrip(".").lower() if len(word) > 1 else word  # H is no hour
        entry = (
            _UNITS.get(word) or _UNITS.get(small.removesuffix("s")) or _UNITS.get(small) or _UNITS.get(singular(small))
        )
        if entry is None:
            return None
        power = sign * wanted * int(match[2] or 1)
        quantity, factor = entry
        for name, exponent in _DERIVED.get(quantity, {quantity: 1}).items():
            powers[name] = powers.get(name, 0) + exponent * power
        size *= (factor * _SIZES.get(quantity, 1)) ** power
        wanted = 1
    if powers:
        return (tuple(sorted((name, power) for name, power in powers.items() if power)), size)
    return None
