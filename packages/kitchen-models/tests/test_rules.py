import pytest
import torch

from kitchen_core.errors import FormatError, UnsupportedError
from kitchen_models.rules import MIN_FEATURES, Rules, decide, parse_option


def format_of(layer, rules, shape=(128, 256), dtype=torch.float32):
    decision = decide(layer, shape, dtype, rules)
    return decision.format.name if decision.format else None


def test_first_match_wins_over_exact_glob_and_regex():
    rules = Rules.of(["a.b=none", "a.*=int8(convrot_groupsize=64)", "re:c[.]\\d=int8,*=none"])
    assert format_of("a.b", rules) is None
    assert decide("a.c", (128, 256), torch.float32, rules).config.convrot_groupsize == 64
    assert format_of("c.1", rules) == "int8_tensorwise"
    assert format_of("c.12", rules) is None, "a regex must match the whole name"


def test_regex_with_commas_and_equal_signs_is_one_rule():
    rules = Rules.of(r"re:l[.]\d{1,2}(?=[.]q).*=int8,x=none").rules
    assert [(r.pattern, r.format) for r in rules] == [(r"re:l[.]\d{1,2}(?=[.]q).*", "int8"), ("x", None)]


def test_mapping_pairs_and_none_are_rules_too():
    rules = Rules.of({"a": None, "b": "int8", "c": ("int8", {"convrot_groupsize": 0})})
    assert [format_of(n, rules) for n in "abc"] == [None, "int8_tensorwise", "int8_tensorwise"]
    assert Rules.of([("a", "none")]).rules[0].format is None
    assert decide("c", (128, 256), torch.float32, rules).config.convrot_groupsize == 0


@pytest.mark.parametrize(
    "name", ["tok_embeddings", "model.embed_tokens", "x.wte", "blocks.0.norm1.linear", "LayerNorm", "lm_head"]
)
def test_default_excludes(name):
    decision = decide(name, (128, 256), torch.float32, Rules.of("int8"))
    assert decision.format is None
    assert "stay" in decision.reason


def test_default_leaves_small_layers_and_a_rule_takes_them():
    shape = (MIN_FEATURES - 1, 256)
    assert "too small" in decide("a", shape, torch.float32, Rules.of("int8")).reason
    assert format_of("a", Rules.of("a=int8"), shape) == "int8_tensorwise"


def test_user_rules_come_before_the_default_excludes():
    assert format_of("embed", Rules.of("embed=int8", format="int8")) == "int8_tensorwise"


@pytest.mark.parametrize(
    ("shape", "dtype", "word"), [((4, 4, 4), torch.float32, "3-D"), ((64, 64), torch.int8, "int8")]
)
def test_what_is_no_float_matrix_is_left(shape, dtype, word):
    assert word in decide("a", shape, dtype, Rules.of("*=int8")).reason


def test_layer_that_a_format_cannot_hold_is_left_with_its_reason():
    decision = decide("a", (128, 100), torch.float32, Rules.of("svdquant"))
    assert decision.format is None
    assert "cannot hold" in decision.reason
    assert "100" in decision.reason


@pytest.mark.parametrize("text", ["*=int8(group_size=2", "a", "=int8", "a=", "a=int8(group)", "re:(=int8"])
def test_bad_grammar_says_what_a_rule_is(text):
    with pytest.raises(UnsupportedError, match=r"rule|option|regular expression|format"):
        Rules.of([text])


@pytest.mark.parametrize("rules", [3, None, 1.5])
def test_what_is_no_list_of_rules_is_shown_what_is(rules):
    with pytest.raises(UnsupportedError, match=f"'pattern=format', a mapping .* got {rules!r}"):
        Rules.of(rules)


def test_unknown_format_and_option_list_the_known_ones():
    with pytest.raises(FormatError, match="int8_tensorwise"):
        Rules.of("a=int9")
    with pytest.raises(UnsupportedError, match="no option group_size; it has: convrot_groupsize"):
        Rules.of("int8", options={"group_size": 16})
    with pytest.raises(UnsupportedError, match="without a format"):
        Rules.of("a=int8", options={"group_size": 16})


def test_rules_file(tmp_path):
    path = tmp_path / "rules.txt"
    path.write_text("# attention stays\n\n*.attn.*=none\nre:a{1,2}=int8\n")
    assert [str(rule) for rule in Rules.read(path)] == ["*.attn.*=none", "re:a{1,2}=int8"]
    with pytest.raises(UnsupportedError, match="cannot read"):
        Rules.read(tmp_path / "none.txt")


def test_options_are_read_as_json_or_words():
    assert parse_option("group-size=32") == ("group_size", 32)
    assert parse_option("levels=uniform") == ("levels", "uniform")
