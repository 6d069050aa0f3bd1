"""The store on S3, against a real server: the contract of every store, and what only a network can do to it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import ssl
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from unittest import mock

import pytest

from ludus.errors import AlreadyExists, Fenced, NotFound, StoreError, StoreFull, StoreUnavailable, UsageError
from ludus.storage.base import MANIFEST, Store, open_store
from ludus.storage.s3 import AT_ONCE, RetryPolicy, S3Store, _retry_delays
from ludus.storage.s3_url import S3Url
from ludus.testing.store_contract import FILES, StoreContract
from tests.s3 import BUCKET, KEY_ID, READER_ID, READER_SECRET, SECRET, Fault, Proxy, Server, free_ports
from tests.tools import need
from tests.waiting import wait_until

T = TypeVar("T")
pytestmark = [pytest.mark.system, pytest.mark.usefixtures("s3_server")]


class _Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


class TestS3Store(StoreContract):
    writers = 2  # this server lets those who meet at one key wait for whole seconds; sixteen do below

    @pytest.fixture
    def store(self, s3_url: str) -> Store:
        return S3Store(s3_url)

    def damage(self, store: Store, key: str, name: str, data: bytes | None) -> None:
        folder = json.loads(store.get(f"{key}/{MANIFEST}"))["parts"]
        if name == MANIFEST and data is not None:
            with contextlib.suppress(ValueError, TypeError):  # so that it is the rest of it that is noticed
                data = json.dumps({**json.loads(data), "parts": folder}).encode()
        where = f"{key}/{MANIFEST}" if name == MANIFEST else f"{key}/{folder}/{name}"
        store.delete(where) if data is None else store.put(where, data)

    def abandon(self, store: Store, key: str, files: Mapping[str, bytes]) -> None:
        """Dies when all is there but the manifest, and cannot clean up."""
        with (
            mock.patch.object(S3Store, "_create", side_effect=_Killed),
            mock.patch.object(S3Store, "_remove_below"),
            pytest.raises(_Killed),
        ):
            store.put_bundle(key, files)


SMALL_PARTS = 5 << 20  # the server takes no smaller ones
LARGE = bytes(range(256)) * (11 << 12)  # 11 MB: three parts


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract has values that are large in earnest; here it is enough that they are in parts."""
    monkeypatch.setattr("ludus.storage.s3.PART_BYTES", SMALL_PARTS)


@pytest.fixture
def hasty(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One retry, then it is unavailable."""
    monkeypatch.setenv("LUDUS_S3_RETRIES", "1")


def _uploads(server: Server, store: S3Store) -> int:
    """Unfinished uploads in parts, as the server itself counts them."""
    status, body = server.ask("GET", BUCKET, f"prefix={S3Url.parse(store.url).prefix}&uploads=")
    assert status == 200
    return body.count(b"<Upload>")


def _objects(server: Server, store: S3Store) -> int:
    status, body = server.ask("GET", BUCKET, f"list-type=2&prefix={S3Url.parse(store.url).prefix}%2F")
    assert status == 200
    return body.count(b"<Contents>")


# -- large values -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_parts")
def test_what_is_large_goes_and_comes_in_parts_of_which_few_are_under_way(s3_server: Server, s3_proxy: Proxy) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    store.put("large", LARGE * 2)
    assert s3_proxy.count("PUT", "partNumber=") == 5
    assert s3_proxy.most <= AT_ONCE
    assert store.get("large") == LARGE * 2
    assert s3_proxy.count("GET", "/large") == 6
    assert _uploads(s3_server, store) == 0


@pytest.mark.usefixtures("small_parts")
def test_a_value_that_is_replaced_while_it_is_read_is_one_or_the_other(s3_server: Server, s3_proxy: Proxy) -> None:
    store, other = S3Store(s3_server.url("replaced", endpoint=s3_proxy.endpoint)), S3Store(s3_server.url("replaced"))
    store.put("large", LARGE)
    s3_proxy.on("GET", Fault(hold=True), header="range")  # the size is known, and one of the parts comes late
    with _thread(lambda: store.get("large")) as read:
        assert s3_proxy.held.wait(30)
        wait_until(lambda: sum("range" in request.headers for request in list(s3_proxy.answered)) == 2)  # the others have come
        other.put("large", LARGE[::-1])
        s3_proxy.go.set()
        assert read() == LARGE[::-1]


# -- a server that fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [503, *(pytest.param(status, marks=pytest.mark.long) for status in (429, 500, 502))])
def test_a_burst_of_errors_is_waited_out(s3_server: Server, s3_proxy: Proxy, status: int) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    s3_proxy.on("", Fault(status=status, code="SlowDown"), times=3)
    store.put("value", b"1")
    s3_proxy.on("", Fault(status=status, code="SlowDown"))
    assert store.get("value") == b"1"
    s3_proxy.on("", Fault(status=status, code="SlowDown"))
    store.put_bundle("bundle", FILES)
    s3_proxy.on("", Fault(status=status, code="SlowDown"))
    assert store.get_bundle("bundle") == dict(FILES)
    s3_proxy.on("", Fault(status=status, code="SlowDown"))
    assert store.list("") == ["bundle", "value"]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(cut_request=1000), id="cut"),
        pytest.param(Fault(cut_request=0), id="cut at once", marks=pytest.mark.long),
        pytest.param(Fault(status=503, code="SlowDown"), id="503", marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("hasty")
def test_a_server_that_keeps_failing_is_unavailable_and_nothing_is_to_be_seen(
    s3_server: Server, s3_proxy: Proxy, fault: Fault
) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    store.put("value", b"old")
    store.put_bundle("checkpoints/000001", FILES)
    s3_proxy.on("PUT", fault, times=1000)
    with pytest.raises(StoreUnavailable, match=r"value at http://127\.0\.0\.1"):
        store.put("value", LARGE)
    with pytest.raises(StoreUnavailable, match="000002"):
        store.put_bundle("checkpoints/000002", {"small": b"1", "large": LARGE})
    with pytest.raises(StoreUnavailable, match="claim"):
        store.put("claim", bytes(10_000), overwrite=False)
    direct = S3Store(s3_server.url(S3Url.parse(store.url).prefix))
    assert direct.get("value") == b"old"
    assert direct.list("checkpoints") == ["000001"]
    assert direct.list("") == ["checkpoints", "value"]
    with pytest.raises(NotFound):
        direct.get_bundle("checkpoints/000002")
    direct.sweep("checkpoints")
    direct.sweep("")
    assert _uploads(s3_server, direct) == 0
    assert _objects(s3_server, direct) == 2 + len(FILES)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    "within",
    ["manifest.json", *(pytest.param(within, marks=pytest.mark.long) for within in ("partNumber=2", "/small", "uploadId="))],
)
def test_a_connection_that_is_cut_once_is_made_again(s3_server: Server, s3_proxy: Proxy, within: str) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    for fault in (Fault(cut_request=10), Fault(lose_answer=True), Fault(cut_answer=10)):
        s3_proxy.on("PUT", fault, within=within)
    store.put_bundle("bundle", {"small": b"1", "large": LARGE})
    assert store.get_bundle("bundle") == {"small": b"1", "large": LARGE}
    assert _uploads(s3_server, store) == 0


@pytest.mark.usefixtures("small_parts")
def test_a_download_that_is_cut_is_taken_up_again(s3_server: Server, s3_proxy: Proxy) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    store.put("small", LARGE[:20_000])
    store.put("large", LARGE)
    for name in ("/small", "/large"):
        s3_proxy.on("GET", Fault(cut_answer=10_000), within=name, times=2)
    assert store.get("small") == LARGE[:20_000]
    assert store.get("large") == LARGE


@pytest.mark.usefixtures("hasty")
def test_a_download_that_is_always_cut_is_unavailable(s3_server: Server, s3_proxy: Proxy) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    store.put("value", LARGE[:100_000])
    s3_proxy.on("GET", Fault(cut_answer=1000), times=1000)
    with pytest.raises(StoreUnavailable):
        store.get("value")


@pytest.mark.parametrize("times", [1, 2])
def test_who_created_it_but_did_not_hear_of_it_still_has_created_it(s3_server: Server, s3_proxy: Proxy, times: int) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    store.put("other", b"1", overwrite=False)
    s3_proxy.on("PUT", Fault(lose_answer=True), within="/claim", times=times)
    store.put("claim", b"mine", overwrite=False)
    assert s3_proxy.count("PUT", "/claim") > times
    with pytest.raises(AlreadyExists, match="claim"):
        store.put("claim", b"mine", overwrite=False)
    assert store.get("claim") == b"mine"


def test_a_slow_server_is_waited_for(s3_server: Server, s3_proxy: Proxy) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    s3_proxy.on("", Fault(delay_s=0.2), times=2)
    store.put_bundle("bundle", FILES)
    assert store.get_bundle("bundle") == dict(FILES)


@pytest.mark.usefixtures("hasty")
def test_a_server_that_does_not_answer_is_unavailable(
    s3_server: Server, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_S3_TIMEOUT_S", "0.1")
    monkeypatch.setenv("LUDUS_S3_RETRY_S", "0.2")
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    s3_proxy.on("", Fault(hold=True), times=1000)
    calls: list[Callable[[], object]] = [
        lambda: store.put("value", b"1"),
        lambda: store.put("value", b"1", overwrite=False),
        lambda: store.get("value"),
        lambda: store.list(""),
        lambda: store.delete("value"),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match="the request timed out"):
            call()


@pytest.mark.usefixtures("hasty")
def test_a_closed_port_is_unavailable(s3_server: Server) -> None:
    store = S3Store(s3_server.url(endpoint=f"http://127.0.0.1:{free_ports(1)[0]}"))
    with pytest.raises(StoreUnavailable, match=r"the connection failed.*endpoint is right"):
        store.put("value", b"1")
    with pytest.raises(StoreUnavailable):
        store.get_bundle("bundle")


@pytest.mark.parametrize(
    ("status", "code", "error", "said"),
    [
        (405, "", StoreError, r"answered 405.*endpoint of an S3 server"),
        (404, "", StoreError, r"answered 404.*endpoint of an S3 server"),
        (404, "NoSuchBucket", NotFound, r"has no such bucket.*correct the URL"),
        (404, "NoSuchUpload", StoreUnavailable, r"aborted"),
        (400, "KeyTooLongError", StoreError, r"answered 400 KeyTooLongError"),
        (409, "OperationAborted", StoreUnavailable, r"answers 409"),
        (501, "NotImplemented", StoreError, r"answered 501"),
        (301, "PermanentRedirect", UsageError, r"another region.*AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", UsageError, r"another region.*AWS_REGION"),
        (403, "RequestTimeTooSkewed", StoreUnavailable, r"Set the clock"),
        (403, "ExpiredToken", StoreUnavailable, r"Not allowed to write .*for now.*expired"),
        (400, "ExpiredToken", StoreUnavailable, r"Not allowed to write .*for now.*expired"),
        (403, "InvalidToken", StoreUnavailable, r"wrong or have expired"),
        (403, "QuotaExceeded", StoreFull, r"No space left to write .*value.*Free some space"),
        (400, "XMinioAdminBucketQuotaExceeded", StoreFull, r"No space left"),
        (507, "", StoreFull, r"No space left"),
    ],
)
def test_error_replies_of_a_server_are_reported(
    s3_server: Server, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch, status: int, code: str, error: type[Exception], said: str
) -> None:
    monkeypatch.setenv("LUDUS_S3_RETRIES", "0")
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    s3_proxy.on("PUT", Fault(status=status, code=code), times=1000)
    with pytest.raises(error, match=said) as caught:
        store.put("value", b"1")
    assert type(caught.value) is error


def test_a_conflict_that_leaves_nothing_behind_is_tried_again(s3_server: Server, s3_proxy: Proxy) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    s3_proxy.on("PUT", Fault(status=409, code="ConditionalRequestConflict"), within="/claim", times=2)
    store.put("claim", b"1", overwrite=False)
    assert store.get("claim") == b"1"


def test_a_server_that_takes_no_notice_of_conditions_is_refused(s3_server: Server, s3_proxy: Proxy) -> None:
    store = S3Store(s3_server.url("heedless", endpoint=s3_proxy.endpoint))
    s3_proxy.on("PUT", Fault(status=200), within=".probe-", times=2)
    with pytest.raises(StoreError, match=r"ignores If-None-Match"):
        store.put("claim", b"1", overwrite=False)
    with pytest.raises(NotFound):
        store.get("claim")
    store.put("claim", b"1", overwrite=False)  # it does heed them after all


@pytest.mark.parametrize("fault", [Fault(lose_answer=True), Fault(cut_answer=10)], ids=["lost", "cut"])
def test_a_trial_of_conditions_whose_answer_is_lost_is_not_taken_for_the_claim(
    s3_server: Server, s3_proxy: Proxy, fault: Fault
) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    s3_proxy.on("PUT", fault, within=".probe-")
    store.put("claim", b"mine", overwrite=False)
    assert store.get("claim") == b"mine"
    assert s3_proxy.count("PUT", ".probe-") >= 2
    assert _objects(s3_server, store) == 1


# -- who may ------------------------------------------------------------------------------------------------------------


def test_a_wrong_secret_is_reported_without_showing_it(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, token = "this/is+a-wrong-secret", "and-a-token"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    store = S3Store(s3_url)
    calls: list[Callable[[], object]] = [
        lambda: store.put("value", b"1"),
        lambda: store.put("value", b"1", overwrite=False),
        lambda: store.put_bundle("bundle", FILES),
        lambda: store.get("value"),
        lambda: store.get_bundle("bundle"),
        lambda: store.list(""),
        lambda: store.delete("value"),
        lambda: store.sweep(""),
    ]
    for call in calls:
        with pytest.raises(StoreFull, match=r"Not allowed to .*credentials") as caught:
            call()
        shown = "".join(traceback.format_exception(caught.value)) + repr(store) + repr(vars(store))
        assert wrong not in shown
        assert token not in shown


def test_what_a_server_repeats_of_a_request_is_not_passed_on(s3_server: Server, s3_proxy: Proxy) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    repeated = "<CanonicalRequest>PUT x-amz-security-token:hunter2token</CanonicalRequest>"
    for status in (400, 403):
        s3_proxy.on("PUT", Fault(status=status, code="SignatureDoesNotMatch", detail=repeated))
        with pytest.raises(StoreError) as caught:
            store.put("value", b"1")
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_a_read_only_user_is_reported(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    S3Store(s3_url).put("value", b"1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    store = S3Store(s3_url)
    assert store.get("value") == b"1"
    assert store.list("") == ["value"]
    with pytest.raises(StoreFull, match=r"Not allowed to write .*value \(403 AccessDenied\).*permission"):
        store.put("value", b"2")
    with pytest.raises(StoreFull, match="Not allowed to write"):
        store.put_bundle("bundle", FILES)
    with pytest.raises(StoreFull, match="Not allowed to delete"):
        store.delete("value")


def test_credentials_in_a_file_are_used_and_renewed(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials"
    file.write_text(f"[default]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = wrong\n")
    monkeypatch.setenv("LUDUS_S3_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of somebody else")
    store = S3Store(s3_url)
    with pytest.raises(StoreFull):
        store.put("value", b"1")
    file.write_text(f"[default]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n")
    store.put("value", b"1")
    assert store.get("value") == b"1"


def test_a_missing_bucket_is_reported(s3_server: Server) -> None:
    store = S3Store(f"s3://no-such-bucket/prefix?endpoint={s3_server.endpoint}")
    for call in (lambda: store.get("value"), lambda: store.list("")):
        with pytest.raises(NotFound, match=r"no-such-bucket.*has no such bucket.*correct the URL"):
            call()


# -- addresses ----------------------------------------------------------------------------------------------------------


def test_the_end_point_may_come_from_the_environment(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    S3Store(s3_server.url("by-environment")).put("value", b"1")
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        with monkeypatch.context() as patch:
            patch.setenv(name, s3_server.endpoint)
            store = open_store(f"s3://{BUCKET}/by-environment/")
            assert store.get("value") == b"1"
            assert store.url == f"s3://{BUCKET}/by-environment"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")  # the address itself comes first
    assert S3Store(s3_server.url("by-environment")).get("value") == b"1"


def test_its_address_opens_it_again_and_prefixes_are_apart(s3_server: Server) -> None:
    one, other, above = (S3Store(s3_server.url(prefix)) for prefix in ("apart/1", "apart/10", "apart"))
    one.put("value", b"1")
    one.put_bundle("bundle", FILES)
    assert other.list("") == []
    assert open_store(one.url).get("value") == b"1"
    assert above.list("1") == ["bundle", "value"]
    assert above.get_bundle("1/bundle") == dict(FILES)


def test_without_the_package_the_extra_is_named() -> None:
    program = (
        "import sys; sys.modules['obstore'] = None\n"
        "from ludus.errors import MissingExtra\n"
        "from ludus.storage.base import open_store\n"
        "try: open_store('s3://bucket/prefix')\n"
        "except MissingExtra as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "A store on S3 needs the package 'obstore'. pip install 'ludus[s3]'\n"


def test_who_does_not_use_s3_does_not_load_it() -> None:
    program = "import sys, ludus.storage.base, ludus.storage.local, ludus.storage.s3_url; print('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"


def test_over_tls_the_certificate_counts(s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_S3_RETRIES", "0")
    authority, context = _certified(tmp_path)
    with Proxy(s3_server.port, tls=context) as proxy:
        with pytest.raises(StoreUnavailable, match=r"certificate.*AWS_CA_BUNDLE"):
            S3Store(s3_server.url(endpoint=proxy.endpoint)).put("value", b"1")
        assert proxy.seen == []
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority))
        store = S3Store(s3_server.url(endpoint=proxy.endpoint))
        store.put("value", b"1")
        assert store.get("value") == b"1"
        assert store.sweep("") == 0
        assert proxy.count("GET", "uploads=") == 1
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "no-such-file"))
    with pytest.raises(UsageError, match=r"no-such-file \(named by AWS_CA_BUNDLE\)"):
        S3Store(s3_server.url(endpoint="https://127.0.0.1:1"))


def _certified(where: Path) -> tuple[Path, ssl.SSLContext]:
    """An authority that nobody knows, and a server at 127.0.0.1 that it vouches for."""

    def make(name: str, *more: str) -> tuple[Path, Path]:
        key, certificate = where / f"{name}.key", where / f"{name}.pem"
        command = [need("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        command += ["-keyout", str(key), "-out", str(certificate), *more]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return key, certificate

    key, authority = make("authority")
    extensions = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE")
    own, certificate = make("server", "-CA", str(authority), "-CAkey", str(key), *extensions)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, own)
    return authority, context


# -- writers that die, readers that are late ----------------------------------------------------------------------------

_WRITER = """
import sys
import ludus.storage.s3
ludus.storage.s3.PART_BYTES = 5 << 20
store = ludus.storage.s3.S3Store(sys.argv[1])
store.put_bundle("checkpoints/000001", {"small": b"1"})
store.put_bundle("checkpoints/000002", {"small": b"1", "large": bytes(11 << 20)})
"""


@pytest.mark.parametrize(
    ("held", "parts", "begun"), [("000002/manifest.json", 2, 0), ("partNumber=2", 1, 1)], ids=["manifest", "part"]
)
def test_a_writer_that_is_killed_leaves_nothing_to_be_seen_and_a_sweep_removes_it(
    s3_server: Server, s3_proxy: Proxy, held: str, parts: int, begun: int
) -> None:
    url = s3_server.url(endpoint=s3_proxy.endpoint)
    s3_proxy.on("PUT", Fault(hold=True), within=held, times=1000)
    store = S3Store(s3_server.url(S3Url.parse(url).prefix))
    with subprocess.Popen([sys.executable, "-c", _WRITER, url], env={**os.environ, **s3_server.environment()}) as writer:
        assert s3_proxy.held.wait(30)
        wait_until(lambda: _objects(s3_server, store) >= 2 + parts)
        os.kill(writer.pid, signal.SIGKILL)
    assert store.list("checkpoints") == ["000001"]
    with pytest.raises(NotFound):
        store.get_bundle("checkpoints/000002")
    assert _uploads(s3_server, store) == begun
    assert store.sweep("") == 0
    assert store.sweep("checkpoints") == 1
    assert _uploads(s3_server, store) == 0
    assert _objects(s3_server, store) == 2
    assert store.sweep("checkpoints") == 0
    assert store.get_bundle("checkpoints/000001") == {"small": b"1"}


def test_a_large_value_whose_writer_is_killed_is_swept_too(s3_server: Server, s3_proxy: Proxy) -> None:
    url = s3_server.url(endpoint=s3_proxy.endpoint)
    s3_proxy.on("PUT", Fault(hold=True), within="partNumber=", times=1000)
    program = (
        "import sys, ludus.storage.s3\n"
        "ludus.storage.s3.PART_BYTES = 5 << 20\n"
        "ludus.storage.s3.S3Store(sys.argv[1]).put('a/log', bytes(11 << 20))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, url], env={**os.environ, **s3_server.environment()}) as writer:
        assert s3_proxy.held.wait(30)
        os.kill(writer.pid, signal.SIGKILL)
    store = S3Store(s3_server.url(S3Url.parse(url).prefix))
    assert _uploads(s3_server, store) == 1
    assert store.sweep("") == 0  # that is further down
    assert store.sweep("a") == 1
    assert _uploads(s3_server, store) == 0


@pytest.mark.usefixtures("small_parts")
def test_a_sweep_leaves_what_this_process_is_writing(s3_server: Server, s3_proxy: Proxy) -> None:
    store = S3Store(s3_server.url("being-written"))
    swept: list[int] = []
    store.put_bundle("checkpoints/000001", FILES, guard=lambda: swept.append(store.sweep("checkpoints")))
    assert swept == [0]
    assert store.get_bundle("checkpoints/000001") == dict(FILES)
    slow = S3Store(s3_server.url("being-written", endpoint=s3_proxy.endpoint))
    s3_proxy.on("PUT", Fault(hold=True), within="partNumber=2")
    with _thread(lambda: slow.put("large", LARGE)) as written:
        assert s3_proxy.held.wait(30)
        assert store.sweep("") == 0
        s3_proxy.go.set()
        written()
    assert store.get("large") == LARGE


def test_a_bundle_that_is_deleted_while_it_is_read_was_not_there(s3_server: Server, s3_proxy: Proxy) -> None:
    store, other = S3Store(s3_server.url("deleted", endpoint=s3_proxy.endpoint)), S3Store(s3_server.url("deleted"))
    store.put_bundle("bundle", FILES)
    s3_proxy.on("GET", Fault(hold=True), within=".parts-", times=len(FILES))
    with _thread(lambda: store.get_bundle("bundle")) as read:
        assert s3_proxy.held.wait(30)
        other.delete("bundle")
        s3_proxy.go.set()
        with pytest.raises(NotFound, match="bundle"):
            read()


def test_what_is_half_deleted_is_not_there_any_more(s3_server: Server, s3_proxy: Proxy) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    store.put_bundle("checkpoints/000001", FILES)
    s3_proxy.on("DELETE", Fault(status=403), within=".parts-", times=1000)
    with pytest.raises(StoreFull):
        store.delete("checkpoints/000001")
    direct = S3Store(s3_server.url(S3Url.parse(store.url).prefix))
    assert direct.list("checkpoints") == []
    with pytest.raises(NotFound):
        direct.get_bundle("checkpoints/000001")
    assert direct.sweep("checkpoints") == 1
    assert _objects(s3_server, direct) == 0


@contextlib.contextmanager
def _thread(act: Callable[[], T]) -> Iterator[Callable[[], T]]:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(act)
        yield lambda: future.result(60)


# -- many ---------------------------------------------------------------------------------------------------------------


def test_many_bundles_are_listed_with_few_requests(s3_server: Server, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    store, names = S3Store(s3_server.url(endpoint=s3_proxy.endpoint)), [f"{i:06d}" for i in range(12)]
    for name in names:
        store.put_bundle(f"checkpoints/{name}", {"file": b"1"})
    store.put("checkpoints/best.json", b"{}")
    TestS3Store().abandon(store, "checkpoints/000012", {"file": b"1"})
    before = s3_proxy.count("GET", "list-type=2")
    assert store.list("checkpoints") == [*names, "best.json"]
    assert s3_proxy.count("GET", "list-type=2") - before == 2
    monkeypatch.setattr("ludus.storage.s3._PAGE", 2)  # as if there were so much below that it is not worth while
    assert store.list("checkpoints") == [*names, "best.json"]


@pytest.mark.long
def test_more_than_one_page_is_listed_and_deleted_whole(s3_url: str) -> None:
    store = S3Store(s3_url)
    names = [f"{i:04d}" for i in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(f"many/{name}", b""), names))
        list(pool.map(lambda name: store.put(f"folders/{name}/file", b""), names))
    assert store.list("many") == names
    assert store.list("folders") == names
    store.delete("many")
    assert store.list("") == ["folders"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_of_sixteen_writers_exactly_one_wins_every_time(s3_server: Server) -> None:
    suite = TestS3Store()
    suite.writers = 16
    for _ in range(4):
        suite.test_of_many_writers_without_overwrite_exactly_one_wins(S3Store(s3_server.url()))
        suite.test_of_many_writers_of_a_bundle_exactly_one_wins(S3Store(s3_server.url()))


def test_the_guard_is_asked_again_before_the_manifest_is_tried_again(s3_server: Server, s3_proxy: Proxy) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    asked: list[int] = []

    def guard() -> None:
        asked.append(s3_proxy.count("PUT", "bundle/manifest.json"))
        if len(asked) == 3:
            raise Fenced("Another process has taken over this run.")

    s3_proxy.on("PUT", Fault(status=503), within="bundle/manifest.json", times=1000)
    with pytest.raises(Fenced):
        store.put_bundle("bundle", FILES, guard=guard)
    assert asked == [0, 1, 2]
    assert store.list("") == []
    assert store.sweep("") == 1
    assert _objects(s3_server, store) == 0


def test_who_is_fenced_off_after_a_lost_answer_does_not_tear_what_was_written(s3_server: Server, s3_proxy: Proxy) -> None:
    store = S3Store(s3_server.url(endpoint=s3_proxy.endpoint))
    asked: list[int] = []

    def guard() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise Fenced("Another process has taken over this run.")

    s3_proxy.on("PUT", Fault(lose_answer=True), within="bundle/manifest.json")
    with pytest.raises(Fenced):
        store.put_bundle("bundle", FILES, guard=guard)
    assert store.get_bundle("bundle") == dict(FILES)


_TRAINER = """
import hashlib, json, os, sys
import ludus.storage.s3
ludus.storage.s3.PART_BYTES = 5 << 20
store = ludus.storage.s3.S3Store(sys.argv[1])
store.sweep("checkpoints")
number = max([int(name) for name in store.list("checkpoints")], default=0)
while True:
    number += 1
    weights = os.urandom(100_000) + bytes((6 << 20) * (number % 2))
    state = json.dumps({"weights": hashlib.sha256(weights).hexdigest()}).encode()
    store.put_bundle(f"checkpoints/{number:06d}", {"weights": weights, "state.json": state})
    os.write(1, b"%d\\n" % number)
    for old in store.list("checkpoints")[:-3]:
        store.delete(f"checkpoints/{old}")
"""


@pytest.mark.long
@pytest.mark.timeout(200)
def test_after_every_kill_what_is_listed_is_whole_and_what_was_acknowledged_is_there(s3_server: Server) -> None:
    url, moments = s3_server.url(), random.Random(0)
    store, interrupted = S3Store(url), 0
    for _ in range(15):
        with subprocess.Popen([sys.executable, "-c", _TRAINER, url], stdout=subprocess.PIPE) as trainer:
            assert trainer.stdout is not None
            lines = trainer.stdout.readline()
            time.sleep(moments.uniform(0, 0.5))
            os.kill(trainer.pid, signal.SIGKILL)
            lines += trainer.stdout.read()
        acknowledged = max(int(line) for line in lines.split(b"\n")[:-1])
        names = store.list("checkpoints")
        assert int(names[-1]) >= acknowledged
        for name in names:
            files = store.get_bundle(f"checkpoints/{name}")
            assert hashlib.sha256(files["weights"]).hexdigest() == json.loads(files["state.json"])["weights"]
        interrupted += _objects(s3_server, store) > 3 * len(names) or _uploads(s3_server, store) > 0
    assert interrupted > 3, "hardly any kill fell into a write: the test shows nothing"
    store.sweep("checkpoints")
    assert _uploads(s3_server, store) == 0
    assert _objects(s3_server, store) == 3 * len(store.list("checkpoints"))


def test_retry_delays_are_bounded_after_many_attempts() -> None:
    pauses = list(_retry_delays(RetryPolicy(total_s=1e6), 2000))
    assert pauses[-1] is None
    assert all(pause is not None and 0 < pause <= 5 for pause in pauses[:-1])
