"""The chain of credentials: which come first, and that none are shown."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from ludus.errors import UsageError
from ludus.storage.s3_credentials import Credentials, client_finds_credentials, find_credentials, find_region

KEYS = {"AWS_ACCESS_KEY_ID": "ENVID", "AWS_SECRET_ACCESS_KEY": "envsecret"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = HOMEID\naws_secret_access_key = home=%secret\n"
        "[other]\naws_access_key_id=OTHERID\naws_secret_access_key=othersecret\naws_session_token=othertoken\nregion=eu-west-1\n"
    )
    (tmp_path / "own").write_text("[default]\naws_access_key_id = OWNID\naws_secret_access_key = ownsecret\n")
    return tmp_path


def test_the_chain_is_gone_through_in_its_order(home: Path) -> None:
    environment = {"HOME": str(home)}
    assert find_credentials(environment) == Credentials("HOMEID", "home=%secret", file=home / ".aws" / "credentials")
    environment["AWS_PROFILE"] = "other"
    assert find_credentials(environment) == Credentials(
        "OTHERID", "othersecret", "othertoken", "eu-west-1", home / ".aws" / "credentials"
    )
    environment |= {"AWS_WEB_IDENTITY_TOKEN_FILE": "/token", "AWS_ROLE_ARN": "arn"}
    assert find_credentials(environment) is None
    assert client_finds_credentials(environment)
    environment |= KEYS
    assert find_credentials(environment) == Credentials("ENVID", "envsecret")
    environment |= {"AWS_SESSION_TOKEN": "envtoken"}
    assert find_credentials(environment) == Credentials("ENVID", "envsecret", "envtoken")
    environment |= {"LUDUS_S3_CREDENTIALS_FILE": str(home / "own"), "AWS_PROFILE": ""}
    assert find_credentials(environment) == Credentials("OWNID", "ownsecret", file=home / "own")  # without the token of another


def test_the_shared_file_may_be_elsewhere(home: Path) -> None:
    assert find_credentials({"HOME": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": str(home / "own")}) == Credentials(
        "OWNID", "ownsecret", file=home / "own"
    )


def test_where_there_are_none_the_client_has_to_look(tmp_path: Path) -> None:
    assert find_credentials({"HOME": str(tmp_path)}) is None
    assert find_credentials({}) is None
    assert not client_finds_credentials({})
    assert client_finds_credentials({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.2/v2"})


@pytest.mark.parametrize("missing", KEYS)
def test_half_of_a_pair_is_a_mistake(missing: str) -> None:
    with pytest.raises(UsageError, match=missing):
        find_credentials({name: value for name, value in KEYS.items() if name != missing})


def test_a_named_file_has_to_have_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no-such-file.*cannot be read"):
        find_credentials({"LUDUS_S3_CREDENTIALS_FILE": str(tmp_path / "no-such-file")})
    (tmp_path / "empty").write_text("[default]\n")
    with pytest.raises(UsageError, match=r"empty.*\[work\]"):
        find_credentials({"LUDUS_S3_CREDENTIALS_FILE": str(tmp_path / "empty"), "AWS_PROFILE": "work"})


@pytest.mark.parametrize(
    "text", ["hunter2secret", "aws_secret_access_key = hunter2secret\n", "[default]\nhunter2secret\n", "\xff"]
)
def test_a_file_that_cannot_be_parsed_is_not_repeated(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="not an INI file") as caught:
        find_credentials({"LUDUS_S3_CREDENTIALS_FILE": str(tmp_path / "file")})
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_secrets_are_not_in_the_text_of_credentials() -> None:
    assert "hunter2" not in repr(Credentials("ID", "hunter2", "hunter2token"))


def test_the_region_comes_from_the_environment_or_the_profile(home: Path) -> None:
    (home / ".aws" / "config").write_text("[default]\nregion = eu-north-1\n[profile other]\nregion = eu-west-3\n")
    environment = {"HOME": str(home)}
    assert find_region(environment) == "eu-north-1"
    assert find_region({**environment, "AWS_PROFILE": "other"}) == "eu-west-3"
    assert find_region({**environment, "AWS_PROFILE": "third"}) is None
    assert find_region({**environment, "AWS_DEFAULT_REGION": "us-west-1"}) == "us-west-1"
    assert find_region({}) is None
