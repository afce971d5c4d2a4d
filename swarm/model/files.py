"""Names of the files that a model in OpenVINO's format consists of."""

DETOKENIZER_IR = "openvino_detokenizer.xml"

TOKENIZER_IRS = (
    "openvino_tokenizer.xml",
    "openvino_tokenizer.bin",
    DETOKENIZER_IR,
    "openvino_detokenizer.bin",
)
"""Without these there is no tokenizer."""

TOKENIZER_FILES = (
    *TOKENIZER_IRS,
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""All that a tokenizer is made of; the configurations where the model has them."""

IR_WEIGHTS = "openvino_model.bin"

IR_FILES = ("openvino_model.xml", IR_WEIGHTS, *TOKENIZER_IRS)
"""A whole IR directory of a language model."""
