"""What the tokens of a vocabulary stand for, byte by byte."""

from apprentice.errors import BadInput
from datamodules.text.vocabulary import Subwords, Vocabulary


def token_texts(vocabulary: Vocabulary | Subwords, flag: str) -> list[bytes]:
    """Return the bytes of each token, of a special one those of its name.

    Raises:
        BadInput: for `flag`, the tokens of a tokenizer are no bytes, as those of SentencePiece.
    """
    if isinstance(vocabulary, Vocabulary):
        if vocabulary.characters is None:
            return [bytes([number]) for number in range(256)]
        return [character.encode(errors="surrogatepass") for character in vocabulary.characters]
    letters = {letter: number for number, letter in enumerate(_letters())}
    added = {number: str(token).encode() for number, token in vocabulary.tokenizer.added_tokens_decoder.items()}
    names = {number: token for token, number in vocabulary.tokenizer.get_vocab().items()}
    texts = list[bytes]()
    for number in range(len(vocabulary)):
        name = names.get(number, "")
        if number in added or not name:
            texts.append(added.get(number, b""))
        elif {*name} <= letters.keys():
            texts.append(bytes(letters[letter] for letter in name))
        else:
            raise BadInput(
                flag, vocabulary.name, f"a tokenizer of bytes, as GPT-2's, Llama 3's and Qwen's; {name!r} is no bytes"
            )
    return texts


def _letters() -> list[str]:
    """Return the letter for each of 256 bytes in the tokens of byte-level BPE (GPT-2, Radford et al. 2019)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]
