"""Vision-language models: how each family of them sees images.

``base.py`` says what a family knows, and each other file is one family or a few that are alike. A family needs the
model's configuration, tokenizer and image processor, and no weights. ``passes.py`` brings the images of a batch into
the passes of a model.
"""
