"""The files that vLLM wants beside the weights of some tiny models: tokenizers and processors, made here."""

from pathlib import Path

import tokenizers
import transformers

from tests.architectures import IMAGE_TOKEN, VOCABULARY

_PIXELS = 32  # each side of an image
_PATCH = 8


def save_tokenizer(folder: Path) -> None:
    _tokenizer().save_pretrained(folder)


def save_whisper_processor(folder: Path) -> None:
    """Two seconds of audio: 200 frames, of which the encoder makes 100 positions."""
    transformers.WhisperProcessor(
        transformers.WhisperFeatureExtractor(chunk_length=2), _tokenizer()
    ).save_pretrained(folder)


def save_idefics3_processor(folder: Path) -> None:
    """An image is one tile, of which the connector makes 4 positions."""
    size = {"longest_edge": _PIXELS}
    transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessorPil(
            size=size, max_image_size=size, do_image_splitting=False
        ),
        _tokenizer(),
        image_seq_len=(_PIXELS // _PATCH) ** 2 // 4,
    ).save_pretrained(folder)


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Single words; the last token ids are special."""
    special = {
        "<end_of_utterance>": IMAGE_TOKEN - 4,
        "<fake_token_around_image>": IMAGE_TOKEN - 3,
        "<global-img>": IMAGE_TOKEN - 2,
        "<|startoftranscript|>": IMAGE_TOKEN - 1,
        "<image>": IMAGE_TOKEN,
        "[BOS]": IMAGE_TOKEN + 1,
        "[EOS]": IMAGE_TOKEN + 2,
        "[UNK]": VOCABULARY - 4,
        "[PAD]": VOCABULARY - 3,
        "[CLS]": VOCABULARY - 2,
        "[SEP]": VOCABULARY - 1,
    }
    words = {f"w{number}": number for number in range(IMAGE_TOKEN - 4)}
    model = tokenizers.models.WordLevel({**words, **special}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="[BOS]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        extra_special_tokens={"image_token": "<image>", "global_image": "<global-img>"},
    )
