import os, sys, http.client

sys.path.insert(0, "/work/main")
os.environ.update(AWS_ACCESS_KEY_ID="KEYID", AWS_SECRET_ACCESS_KEY="SECRETVALUE", AWS_REGION="us-east-1", LUDUS_S3_RETRIES="1")
from ludus.store.s3 import S3Store

c = http.client.HTTPConnection("127.0.0.1", 43902)
c.request("PUT", "/ludus")
print(c.getresponse().status)
for name, port in (("rclone", 43901), ("moto", 43902)):
    s = S3Store(f"s3://ludus/x?endpoint=http://127.0.0.1:{port}")

    def t(what, f):
        try:
            print(name, what, repr(f())[:100])
        except Exception as e:
            print(name, what, type(e).__name__, str(e)[:200])

    t("put", lambda: s.put("v", b"1"))
    t("get", lambda: s.get("v"))
    t("claim", lambda: s.put("c", b"1", overwrite=False))
    t("claim2", lambda: s.put("c", b"1", overwrite=False))
    t("bundle", lambda: s.put_bundle("b", {"a": b"1", "big": bytes(20 << 20)}))
    t("list", lambda: s.list(""))
    t("getb", lambda: len(s.get_bundle("b")["big"]))
    t("sweep", lambda: s.sweep(""))
    t("del", lambda: s.delete("b"))
    t("list", lambda: s.list(""))
