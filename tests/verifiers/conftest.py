import pytest

from rlvr.verifiers import VerifierPool


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(workers=2) as pool:
        yield pool
