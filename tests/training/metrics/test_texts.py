"""Metrics of texts beside references."""

import pytest

from onnxgrad.errors import BadInput
from onnxgrad.training.measure.texts import compare_texts

TEXTS = ["the cat sat on the mat today", "a dog ran", " red "]
REFERENCES = ["the cat sat on a mat today", "a dog ran to a tree", "red"]


def test_exact_ignores_space_at_the_ends():
    assert compare_texts(TEXTS, REFERENCES) == {"exact": 1 / 3}


def test_rouge():
    pytest.importorskip("rouge_score")
    found = compare_texts(TEXTS, REFERENCES, "rouge1,rouge2,rougeL")
    words = (6 / 7 + 2 * 3 / 9 + 1) / 3  # 2·common ÷ (words of both)
    assert found["rouge1"] == pytest.approx(words)
    assert found["rougeL"] == pytest.approx(words)
    assert found["rouge2"] == pytest.approx((2 * 4 / 12 + 2 * 2 / 7 + 0) / 3)


def test_bleu_and_chrf():
    sacrebleu = pytest.importorskip("sacrebleu")
    found = compare_texts(TEXTS, REFERENCES, ["bleu", "chrf"])
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(TEXTS, [REFERENCES]).score)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(TEXTS, [REFERENCES]).score)
    assert compare_texts(REFERENCES[:1], REFERENCES[:1], "bleu")["bleu"] == pytest.approx(100)


@pytest.mark.parametrize(("metric", "package"), [("bleu", "sacrebleu"), ("rougeL", "rouge-score")])
def test_a_missing_package_is_named(monkeypatch, metric, package):
    import sys

    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(BadInput, match=rf"needs {package}\n.*text-metrics"):
        compare_texts(TEXTS, REFERENCES, metric)


def test_what_does_not_fit_is_refused():
    with pytest.raises(BadInput, match="3 texts and 2 references"):
        compare_texts(TEXTS, REFERENCES[:2])
    with pytest.raises(BadInput, match="auc is no metric for a task of texts; those are exact, bleu"):
        compare_texts(TEXTS, REFERENCES, "auc")
