"""A model shows itself as one line, and as a card in notebooks."""

from __future__ import annotations


def test_a_model_is_one_line_and_a_card(tiny):
    model = tiny(ratio=2)
    assert repr(model).startswith("HybridModel(tiny: 0.") and "\n" not in repr(model)
    card = model._repr_html_()
    assert "5: 3 gated DeltaNet, 2 gated attention" in card and "MTP head" in card and "exact" in card


def test_a_card_says_when_there_is_no_drafter_and_hides_paths(tiny):
    model = tiny(mtp=False, exact=False)
    model.source = "/somewhere/private/checkpoint/"
    assert repr(model).startswith("HybridModel(checkpoint: ") and "private" not in model._repr_html_()
    assert "no mtp.* weights" in repr(model) and "fast" in repr(model)
