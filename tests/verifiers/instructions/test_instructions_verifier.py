# ruff: noqa: RUF001  many scripts stand here on purpose
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.core.sentences import sentences as sentence_spans
from rlvr.records import Task, VerdictStatus
from rlvr.verifiers import InstructionsVerifier
from rlvr.verifiers.instructions.instruction_registry import CONSTRAINTS
from rlvr.verifiers.instructions.instructions_verifier import loose_variants
from rlvr.verifiers.instructions.language import detect

ENGLISH = "the weather is nice today and we are going to the park with the children."
FRENCH = "Il fait beau aujourd'hui et nous allons au parc avec les enfants."

# id -> kwargs, texts that follow, texts that do not: worked out by hand from the instruction's wording
CASES = {
    "keywords:existence": (
        {"keywords": ["art", "C++"]},
        ["Art is made with C++.", "a party, and c++", "ARTC++"],
        ["art only", "C++ only", "ar t C+ +", "CCC art"],
    ),
    "keywords:frequency": (
        {"keyword": "cat", "frequency": 2, "relation": "at least"},
        ["cat Cat", "concatenated cats", "cat, cat, cat"],
        ["cat", "c at ca t", "dog dog"],
    ),
    "keywords:forbidden_words": (
        {"forbidden_words": ["cat", "c++"]},
        ["concatenate", "dogs and C", "cats", "c+ + and c"],
        ["a cat.", "CAT", "in C++, say", "c++"],
    ),
    "keywords:letter_frequency": (
        {"letter": "E", "let_frequency": 3, "let_relation": "less than"},
        ["be", "Eve", "nothing"],
        ["eee", "EeE", "Every eve"],
    ),
    "language:response_language": (
        {"language": "fr"},
        [FRENCH, FRENCH.upper(), f"1. {FRENCH}\n2. {FRENCH}"],
        [ENGLISH, "123", "!!!", "\U0001f600", f"Salut. {ENGLISH * 3}"],
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "at least"},
        ["One. Two! Three?", "A cat sat. \"It did.\" Then it left...", "One.\n\nTwo.\n\nThree", "一。二。三。"],
        ["One. Two.", "Dr. J. Smith met Mr. Jones vs. Mrs. "
                      "Lee.", "1. One 2. two", "3.14 and 2.71 and 1.41", ". . . .", "No! . ?"],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "***\none\n***\ntwo\n***", "one *** two"],
        ["one", "one\n\ntwo", "one\n***\n***\ntwo", "a***b***c", "***", "******"],
    ),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "less than"},
        ["one two", "one,", "...one... two!"],
        ["one two three", "don't stop", "a-b-c"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "Hello"},
        ["a\n\nhello there\n\nc", "a\n\n\n\n'Hello,' he said\n\nc", "a\n\nHELLO!\n\nc\n\n", "\n\na\n\nHello\n\nb"],
        ["a\n\nhello", "hello\n\nb\n\nc", "a\n\nhelloes\n\nc", "a\n\nb\n\nhello", "a\n\nhello\n\nc\n\nd", "\n\n\n\n"],
    ),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2},
        ["Dear [name], at [address]", "[a][b]", "[[a] [b]]", "[x] [y] [z]"],
        ["Dear [name]", "[][]", "[ ] [ ]", "[.] [!]", "[a\n] [b", "]a[ ]b["],
    ),
    "detectable_content:postscript": (
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. I love you", "bye. p. s. call me", "P.S.x", "**P.S.** one more thing"],
        ["Bye", "P.S.", "Bye\n\nP.S. ...", "the ship.s. are", "PS call me"],
    ),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2},
        ["* one\n* two", "- one\n- two\n", "intro\n  * one\n\n  - two", "* a\n---\n* b", "- -5\n- -6", "* * *\n* a\n* b"],
        ["* one", "* one\n* two\n* three", "*one*\n*two*", "-5\n-6", "*\n*", "- \n- ", "* *\n- -", "one * two * three"],
    ),
    "detectable_format:constrained_response": (
        {},
        ["My answer is yes.", "I think so. My answer is maybe. Sorry!", "My answer is no."],
        ["yes", "My answer is yes", "my answer is yes.", "My answer is yes. My answer is no.", "My answer is not yes."],
    ),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        ["*one* and **two**", "***one*** *two*", "* item *one*\n* item *two*", "**a b** x **c d**"],
        ["*one*", "***one***", "****", "** **", "* a * b * c *", "*a\nb* *c\nd*", "** one ** two **", "* one\n* two\n* three"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\nfirst\nSection "
         "2\nsecond", "# Section 1: A\nx\n**Section 2**\ny", "Section1\na\nSection2\nb\nSection3\nc"],
        ["Section 1\nfirst", "Section 1 Section 2 Section 3", "SECTION 1\na\nSECTION 2\nb", "Section 1\nSection 2", "as Section 1 says,\nand Section 2 too", "Section A\na\nSection B\nb"],
    ),
    "detectable_format:json_format": (
        {},
        ['{"a": [1, 2]}', '```json\n{"a": 1}\n```', "```\n[1]\n```", ' {"a": null}\n'],
        ["{'a': 1}", "1", '"text"', "null", 'Here: {"a": 1}', '{"a": 1} done', '{"a": 1}{"b": 2}', '{"a": NaN}', '{"a": 1, "a": 2}', '```json\n{"a": 1}', "```json", "[" * 100 + "]" * 100],
    ),
    "detectable_format:title": (
        {},
        ["<<poem of joy>>\nRoses", "text <<a < b>> text", "<<<x>>>"],
        ["poem of joy", "<poem>", "<<>>", "<< >>", "<<a\nb>>", ">>a<<", "<<<<>>>>"],
    ),
    "combination:two_responses": (
        {},
        ["one\n******\ntwo", "******\none\n******\ntwo\n******"],
        ["one", "one******one", "One!\n******\n one.", "one******two******three", "one************two", "******one", "!******?"],
    ),
    "combination:repeat_prompt": (
        {"prompt_to_repeat": "Write a poem. "},
        ["Write a poem.\nRoses are red", "  write a poem. Violets"],
        ["Roses are red. Write a poem.", "Write a poem.", "Write a poem. !!!", "Write  a poem. Roses", '"Write a poem." Roses'],
    ),
    "startend:end_checker": (
        {"end_phrase": "Any questions?"},
        ["All done. Any questions?", '"So. any QUESTIONS?" ', "Any questions?\n"],
        ["Any questions? No.", "Any questions", "Any questions??"],
    ),
    "startend:quotation": (
        {},
        ['"text"', ' "a "b" c"\n', '"x"'],
        ["text", '"text', 'text"', '""', '"', '" "', "'text'", '"""'],
    ),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["I am BIG", "NASA and ESA", "WELL-KNOWN FACTS", "A B"],
        ["BIG", "WELL-KNOWN fact", "Big Bad", "DON'T", "NaSa iBM"],
    ),
    "change_case:english_capital": (
        {},
        [ENGLISH.upper(), f"1) {ENGLISH.upper()}"],
        [ENGLISH, ENGLISH.upper() + "x", FRENCH.upper(), "123", ENGLISH.title()],
    ),
    "change_case:english_lowercase": (
        {},
        [ENGLISH, f"- {ENGLISH}"],
        [ENGLISH.upper(), "I think " + ENGLISH, FRENCH.lower(), "123", "今日は天気が良い"],
    ),
    "punctuation:no_comma": (
        {},
        ["no comma here; none.", "1.000"],
        ["one, two", "1,000", "一，二", "a\u060cb", ","],
    ),
}  # fmt: skip


def verdict(id, kwargs, text, **options):
    task = Task("t", "p", info={"instruction_id_list": [id], "kwargs": [kwargs]})
    assert InstructionsVerifier().check_task(task) is None
    return InstructionsVerifier(**options).verify(task, text)


def test_there_are_the_25_kinds_of_the_paper():
    assert set(CONSTRAINTS) == set(CASES)
    assert len(CONSTRAINTS) == 25


@pytest.mark.parametrize(
    ("id", "text", "follows"),
    [(id, text, side == 1) for id, case in CASES.items() for side in (1, 2) for text in case[side]],
)
def test_constraints_both_ways(id, text, follows):
    assert verdict(id, CASES[id][0], text).score == float(follows)


@pytest.mark.parametrize("id", list(CASES))
@pytest.mark.parametrize("text", ["", " ", "\n\n", "...", "***", "!?", "\U0001f600"])
def test_a_response_that_says_nothing_follows_nothing(id, text):
    for evaluation in ("strict", "loose"):
        assert verdict(id, CASES[id][0], text, evaluation=evaluation).score == 0


@pytest.mark.parametrize("relation", ["less than", "at least"])
@pytest.mark.parametrize(
    ("id", "count", "relation_name", "rest", "text", "number"),
    [
        ("keywords:frequency", "frequency", "relation", {"keyword": "a"}, "a b a", 2),
        ("keywords:letter_frequency", "let_frequency", "let_relation", {"letter": "!"}, "a! b! c!", 3),
        ("length_constraints:number_words", "num_words", "relation", {}, "one two three four", 4),
        ("length_constraints:number_sentences", "num_sentences", "relation", {}, "One. Two.", 2),
        ("change_case:capital_word_frequency", "capital_frequency", "capital_relation", {}, "AB cd EF", 2),
    ],
)
def test_relations_at_their_edges(id, count, relation_name, rest, text, number, relation):
    for threshold in (number - 1, number, number + 1):
        follows = number < threshold if relation == "less than" else number >= threshold
        assert verdict(id, {**rest, count: threshold, relation_name: relation}, text).score == float(follows)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", 0), ("word", 1), ("One. Two.", 2), ("One.Two.", 1), ("Really?! Yes.", 2), ("Wait... what?", 2),
        ('He said "Go." Then he left.', 2), ("(It is.) So.", 2), ("It costs 3.50 dollars. Cheap.", 2),
        ("Mr. Smith and Dr. Lee met.", 1), ("J. R. Tolkien wrote it. Yes.", 2), ("I like it, e.g. the end. Good.", 2),
        ("He lives in the U.S. It is "
         "big.", 2), ("He lives in the U.S. since "
                      "May.", 1), ("cats, dogs, etc. Then more.", 2), ("cats, etc. and dogs. More.", 2), ("Acme Inc. makes it.", 1),
        ("1. First thing.\n2. Second thing.", 2), ("It was 1999. Then came 2000.", 2), ("So am I. You too.", 2),
        ("He said no. She sat. The sun rose.", 3), ("**Bold.** Next.", 2), ("A line\nthat goes on.", 1),
        ("Heading\n\nText here.", 1), ("今日は晴れ。明日は雨！", 2), ("No end here", 1), ("!!! ... ???", 0), ("see example.com now.", 1),
    ],
)  # fmt: skip
def test_sentences(text, number):
    assert len(sentence_spans(text)) == number


LANGUAGES = {
    "en": ENGLISH, "fr": FRENCH, "es": "El tiempo es bueno hoy y vamos al parque con los niños.",
    "pt": "O tempo está bom hoje e vamos ao parque com as "
          "crianças.", "ar": "الطقس جميل اليوم وسوف نذهب إلى الحديقة مع الأطفال.",
    "hi": "आज मौसम अच्छा है और हम बच्चों के साथ पार्क जा रहे "
          "हैं।", "ru": "Сегодня хорошая погода, и мы идём в парк с детьми.",
    "de": "Das Wetter ist heute schön und wir gehen mit den Kindern in den Park.", "ja": "今日は天気が良いので、子供たちと公園に行きます。",
    "it": "Oggi il tempo è bello e andiamo al parco con i "
          "bambini.", "bn": "আজ আবহাওয়া সুন্দর এবং আমরা শিশুদের সাথে পার্কে যাচ্ছি।",
    "uk": "Сьогодні гарна погода, і ми йдемо до парку з дітьми.", "th": "วันนี้อากาศดีและเรากำลังไปสวนสาธารณะกับเด็กๆ",
    "ur": "آج موسم اچھا ہے اور ہم بچوں کے ساتھ پارک جا رہے "
          "ہیں۔", "ta": "இன்று வானிலை நன்றாக உள்ளது, நாங்கள் பூங்காவிற்குச் செல்கிறோம்.",
    "te": "ఈరోజు వాతావరణం బాగుంది మరియు మేము పిల్లలతో పార్కుకు "
          "వెళ్తున్నాము.", "bg": "Днес времето е хубаво и отиваме в парка с децата.",
    "ko": "오늘은 날씨가 좋아서 아이들과 함께 공원에 갑니다.", "pl": "Dziś jest ładna pogoda i idziemy z dziećmi do parku.",
    "he": "מזג האוויר נעים היום ואנחנו הולכים לפארק עם "
          "הילדים.", "fa": "امروز هوا خوب است و ما با بچه‌ها به پارک می‌رویم.",
    "vi": "Hôm nay thời tiết đẹp và chúng tôi đi công viên với bọn "
          "trẻ.", "ne": "आज मौसम राम्रो छ र हामी बच्चाहरूसँग पार्क जाँदैछौं।",
    "sw": "Hali ya hewa ni nzuri leo na tunaenda kwenye bustani pamoja na "
          "watoto.", "kn": "ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ ಮತ್ತು ನಾವು ಉದ್ಯಾನವನಕ್ಕೆ ಹೋಗುತ್ತಿದ್ದೇವೆ.",
    "mr": "आज हवामान छान आहे आणि आम्ही मुलांसोबत उद्यानात जात "
          "आहोत.", "gu": "આજે હવામાન સારું છે અને અમે બાળકો સાથે પાર્કમાં જઈ રહ્યા છીએ.",
    "pa": "ਅੱਜ ਮੌਸਮ ਚੰਗਾ ਹੈ ਅਤੇ ਅਸੀਂ ਬੱਚਿਆਂ ਨਾਲ ਪਾਰਕ ਜਾ ਰਹੇ "
          "ਹਾਂ।", "ml": "ഇന്ന് കാലാവസ്ഥ നല്ലതാണ്, ഞങ്ങൾ പാർക്കിലേക്ക് പോകുന്നു.",
    "fi": "Tänään on kaunis sää ja menemme lasten kanssa puistoon.",
}  # fmt: skip


def test_the_30_languages_of_the_data_are_told_without_a_network(monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("no network"))
    assert {code: detect(text) for code, text in LANGUAGES.items()} == {code: code for code in LANGUAGES}
    assert len(LANGUAGES) == 30


def test_the_language_is_that_of_the_whole_text():
    assert detect(f"{FRENCH} {ENGLISH * 10}") == "en"
    assert detect("1 + 1 = 2 !!") is None
    assert verdict("language:response_language", {"language": "pt_BR"}, LANGUAGES["pt"]).score == 1


def test_loose_variants_are_the_papers_eight():
    assert loose_variants("Sure!\n*a*\nb*\nBye") == [
        "Sure!\n*a*\nb*\nBye", "*a*\nb*\nBye", "Sure!\n*a*\nb*", "*a*\nb*",
        "Sure!\na\nb\nBye", "a\nb\nBye", "Sure!\na\nb", "a\nb",
    ]  # fmt: skip
    assert loose_variants("one line") == ["one line", ""]


def test_loose_evaluation_forgives_an_introduction():
    text = 'Sure, here it is:\n\n**"all is quoted"**'
    assert verdict("startend:quotation", {}, text).score == 0
    assert verdict("startend:quotation", {}, text, evaluation="loose").score == 1
    assert verdict("punctuation:no_comma", {}, "one, two", evaluation="loose").score == 0


def test_all_and_mean_and_the_scores_of_each():
    info = {
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence", "keywords:existence"],
        "kwargs": [{}, {"keywords": ["a"]}, {"keywords": ["z"]}],
    }
    task = Task("t", "p", info=info)
    strict = InstructionsVerifier().verify(task, "a b")
    assert (strict.status, strict.score) == (VerdictStatus.WRONG, 0.0)
    assert strict.scores == {"punctuation:no_comma": 1.0, "keywords:existence": 1.0, "keywords:existence#2": 0.0}
    assert strict.reason == "not followed: keywords:existence#2"
    mean = InstructionsVerifier(aggregate="mean").verify(task, "a b")
    assert (mean.status, mean.score) == (VerdictStatus.PARTIAL, pytest.approx(2 / 3))
    assert InstructionsVerifier().verify(task, "a z").status is VerdictStatus.CORRECT


def test_only_the_text_after_the_reasoning_counts():
    assert verdict("punctuation:no_comma", {}, "<think>a, b</think>none").score == 1
    assert verdict("keywords:existence", {"keywords": ["a"]}, "<think>a</think>b").score == 0
    unfinished = verdict("punctuation:no_comma", {}, "<think>none")
    assert (unfinished.status, unfinished.score) == (VerdictStatus.UNPARSABLE, 0.0)


def test_rows_of_the_public_data_are_taken_as_they_are():
    empty = dict.fromkeys(["num_highlights", "relation", "num_words", "capital_frequency", "language", "keywords"])
    info = {
        "instruction_id_list": ["detectable_format:number_highlighted_sections", "length_constraints:number_words"],
        "kwargs": [{**empty, "num_highlights": 1}, {**empty, "relation": "at least", "num_words": 3.0}],
    }
    # null arguments of other kinds are dropped: the parquet file has the union of all names in each row
    assert InstructionsVerifier().verify(Task("t", "p", info=info), "*one* two three").score == 1


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({}, "instruction_id_list"),
        ({"instruction_id_list": []}, "not empty"),
        ({"instruction_id_list": "punctuation:no_comma"}, "is a list of ids"),
        ({"instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]}, "did you mean 'punctuation:no_comma'"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "one mapping for each of the 1"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["x"]}, "a mapping, not str"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "needs the argument 'keywords'"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keyword": "x"}]}, "did you mean 'keywords'"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": []}]}, "keywords=[]"),
        ({"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": [" "]}]}, "keywords="),
        ({"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": 3, "relation": "at most"}]}, "relation='at most'"),
        ({"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": -1, "relation": "at least"}]}, "num_words=-1"),
        ({"instruction_id_list": ["keywords:letter_frequency"], "kwargs": [{"letter": "ab", "let_frequency": 1, "let_relation": "at least"}]}, "letter='ab'"),
        ({"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "klingon"}]}, "no language "
                                                                                                       "is known as 'klingon'"),
        ({"instruction_id_list": ["length_constraints:nth_paragraph_first_word"], "kwargs": [{"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "x"}]}, "beyond num_paragraphs"),
        ({"instruction_id_list": [None], "kwargs": [{}]}, "no instruction None"),
    ],
)  # fmt: skip
def test_bad_tasks_are_found_before_training_and_undecided_after(info, problem):
    task = Task("t", "p", info=info)
    assert problem in InstructionsVerifier().check_task(task)
    assert InstructionsVerifier().verify(task, "text").score is None


TEXTS = st.text(st.characters(), max_size=200) | st.text(alphabet='[]<>*-_#."!?\n ,aA1`{}', max_size=200)


@given(TEXTS)
@settings(max_examples=150, deadline=None)
def test_no_text_makes_a_constraint_raise(text):
    for id, (kwargs, _, _) in CASES.items():
        for evaluation in ("strict", "loose"):
            assert verdict(id, kwargs, text, evaluation=evaluation).score in (0.0, 1.0)


@given(
    st.lists(st.sampled_from(["One word.", "Two words!", "Is it?", "It works."]), min_size=1, max_size=30),
    st.sampled_from([" ", "\n", "\n\n"]),
)
def test_plain_sentences_are_counted_however_they_are_spaced(sentences, space):
    assert len(sentence_spans(space.join(sentences))) == len(sentences)


@pytest.mark.parametrize(
    "piece",
    ["[", "<<", "*", "* ", "- - ", ".", ". ", "...)", "a.", "a. ", "\n", "\n\n", " ", "P.", "p. ", "Section ", "#", "Section 1", "```", "{", "[[", '"', "A-", "a'", "***", "\u3002", "aB1 ", "1. "],
)  # fmt: skip
def test_time_is_linear_in_the_text(piece):
    """100 kB against 25 kB: linear is 4 times, quadratic 16 times; a floor keeps clock noise out."""
    infos = {"instruction_id_list": list(CASES), "kwargs": [case[0] for case in CASES.values()]}
    task, verifier = Task("t", "p", info=infos), InstructionsVerifier()

    def seconds(size):
        text = "x " + piece * (size // len(piece))
        best = float("inf")
        for _ in range(2):
            start = time.process_time()
            assert verifier.verify(task, text).score == 0
            best = min(best, time.process_time() - start)
        return best

    seconds(1000)
    assert seconds(100_000) < max(10 * seconds(25_000), 0.1)


def test_1_mb_of_prose_takes_seconds_at_most():
    info = {"instruction_id_list": list(CASES), "kwargs": [case[0] for case in CASES.values()]}
    start = time.process_time()
    InstructionsVerifier(evaluation="loose").verify(Task("t", "p", info=info), f"{ENGLISH}\n" * 13_000)
    assert time.process_time() - start < 30


def test_it_is_registered():
    assert isinstance(registry.build("verifier", {"name": "instructions", "aggregate": "mean"}), InstructionsVerifier)


@pytest.mark.parametrize(
    "text",
    [
        "a b\u200bad day",
        "a b\u0430d day",
        "a \uff42\uff41\uff44 day",
        "a b\u0336a\u0336d\u0336 day",
        "a \U0001d41b\U0001d41a\U0001d41d day",
        "a b&#8203;ad day",
        "a BAD day",
    ],
)
def test_a_forbidden_word_is_found_as_a_reader_sees_it(text):
    def follows(**constraint):
        info = {"instruction_id_list": [constraint.pop("id")], "kwargs": [constraint]}
        return InstructionsVerifier().verify(Task("t", "p", info=info), text).score

    assert follows(id="keywords:forbidden_words", forbidden_words=["bad"]) == 0
    assert follows(id="keywords:forbidden_words", forbidden_words=["ba"]) == 1
    assert follows(id="keywords:frequency", keyword="bad", frequency=1, relation="less than") == 0
    assert follows(id="keywords:letter_frequency", letter="b", let_frequency=1, let_relation="less than") == 0


def test_unseen_characters_are_no_words():
    info = {
        "instruction_id_list": ["length_constraints:number_words"],
        "kwargs": [{"num_words": 4, "relation": "at least"}],
    }
    assert InstructionsVerifier().verify(Task("t", "p", info=info), "one&nbsp;two&nbsp;three").score == 0
    assert InstructionsVerifier().verify(Task("t", "p", info=info), "&nbsp;" * 9).score == 0
    assert InstructionsVerifier().verify(Task("t", "p", info=info), "one two three four").score == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("We follow plan B. It works.", 2), ("Take vitamin C. Then rest.", 2), ("The value of x. Then y.", 2), ("It was J. Smith who came.", 1),
        ("Written by J. K. Rowling. It "
         "sold.", 2), ("See e.g. the sea.", 1), ("This is plan B.", 1), ("A type A. B is other.", 2), ("He met Mr. X. It rained.", 1),
    ],
)  # fmt: skip
def test_a_letter_that_names_something_may_end_a_sentence(text, count):
    assert len(sentence_spans(text)) == count


@pytest.mark.parametrize(
    "text", ["some \u0455\u057dg\u0430r here", "some su\u0581ar here", "some s\u200bu\u2060gar here"]
)
def test_letters_of_armenian_and_cyrillic_are_those_that_they_look_like(text):
    info = {"instruction_id_list": ["keywords:forbidden_words"], "kwargs": [{"forbidden_words": ["sugar"]}]}
    assert InstructionsVerifier().verify(Task("t", "p", info=info), text).score == 0
