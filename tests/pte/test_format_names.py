"""Names that are a part of the file formats: files that were written before have to stay readable."""

from exir_lowering.pte import digests, payloads, provenance


def test_keys_of_named_data() -> None:
    assert digests.KEY == "exir_lowering.digests"
    assert digests.DATA_KEY == "exir_lowering.digest/"
    assert digests.END == b"EXLSEAL2"
    assert payloads.original_key("forward", 3) == "exir_lowering.original/forward/3"
    assert provenance.KEY == "exir_lowering.provenance" and provenance.VERSION == 1
