# Ludus client for Godot 4 games (docs/protocol.md) in one file. For Godot 3 use ../ludus.gd.
#
#     var ludus = preload("res://ludus.gd").new("http://127.0.0.1:8000", {"deadline_ms": 30, "fallback": "repeat"})
#     if not ludus.start(): print(ludus.message, " ", ludus.hint)
#
# In a frame, waiting for at most the deadline:           Or without waiting, frame by frame:
#     if ludus.tick(observation): apply(ludus.reply)          if ludus.poll() == Ludus.DONE: apply(ludus.reply)
#     elif ludus.error == "lost": ludus.start()               if ludus.poll() != Ludus.BUSY: ludus.begin_tick(observation)
#
# A tick has a deadline. If it is missed, `reply` is the fallback, `fell_back` is true, `missed` is incremented, and the next tick
# synchronises with the server again. `start` and `end` retry until timeout_ms. Every request is numbered: a request that is sent twice
# counts once, and a reply is never mistaken for that of another request.
#
# Every method that sends a request returns whether it succeeded. If not, `error` has the kind of failure:
#     refused        the server refused: see status, word, message, hint
#     lost           the server no longer has this session: start again
#     deadline       no answer to a tick in time, and no fallback; the session continues
#     unreachable    no answer; the request may or may not have counted
#     usage          invalid call, nothing was sent: see message
# After `unreachable` a start or an end may be repeated unchanged, and counts once. One object is one session at a time, on a persistent
# connection.
extends RefCounted

enum { IDLE, BUSY, DONE, FAILED }  # what poll() returns

# Options: keys of the second argument of new().
var token = ""
var timeout_ms = 10000  # for each start, end and spec, including retries
var deadline_ms = 10000  # for a tick, including retries
var fallback = "error"  # or "repeat": the last reply to a tick (before the first: the default); or "default"
var default = null  # a PackedByteArray
var retries = 2  # number of retries after a broken connection
var max_reply_bytes = 64 << 20
var certificate = null  # with https: an X509Certificate to trust instead of the system's

# Result of the last request.
var reply = PackedByteArray()
var fell_back = false
var missed = 0  # in this session
var error = ""
var status = 0
var word = ""
var message = ""
var hint = ""
var session = ""

const MAX_HEAD = 16384
const MAX_NUMBER = 9007199254740992.0  # JSON numbers are doubles here
const RETRY_PAUSE_MS = 200
const MAX_BUSY_PAUSE_MS = 20
const OPTIONS = ["token", "timeout_ms", "deadline_ms", "fallback", "default", "retries", "max_reply_bytes", "certificate"]

enum { PAUSE, BEGIN, RESOLVE, CONNECT, SECURE, SEND, READ }

var _wrong = ""  # error in the url or the options
var _host = ""
var _port = 80
var _path = ""
var _authority = ""
var _tls = false

var _state = IDLE
var _phase = BEGIN
var _tcp = null
var _stream = null  # _tcp, or TLS over it
var _resolving = -1
var _address = ""
var _family = IP.TYPE_NONE

var _kind = ""
var _body = PackedByteArray()
var _extra = ""
var _deadline = 0  # in microseconds, like all times here
var _until = 0
var _failures = 0
var _rounds = 0
var _number = 0
var _request = PackedByteArray()
var _sent = 0
var _early = false  # the answer arrived before the whole request was sent
var _buffer = PackedByteArray()
var _head = {}  # head of the reply that is being read
var _chunks = PackedByteArray()

var _open = false  # a session is open
var _last = 0  # number of the last request known to have counted; the next one is 1 higher
var _unsure = false  # an attempt had no answer and may still arrive, after any number of other requests: 409 corrects _last
var _good = null  # the last reply to a tick


func _init(url = "http://127.0.0.1:8000", options = {}):
	for name in options:
		if name in OPTIONS:
			set(name, options[name])
		else:
			_wrong = "There is no option %s." % name
	var rest = url
	if url.begins_with("https://"):
		_tls = true
		rest = url.substr(8)
	elif url.begins_with("http://"):
		rest = url.substr(7)
	else:
		rest = ""
	var slash = rest.find("/")
	_authority = rest if slash < 0 else rest.substr(0, slash)
	_path = "" if slash < 0 else rest.substr(slash).rstrip("/")
	var colon = _authority.rfind(":")
	var port = "443" if _tls else "80"
	_host = _authority
	if colon > _authority.rfind("]"):
		port = _authority.substr(colon + 1)
		_host = _authority.substr(0, colon)
	_host = _host.lstrip("[").rstrip("]")
	_port = int(port)
	if not _header_fits(_host, 256) or " " in url or "?" in url or "@" in url or not _is_number(port, 5) or _port < 1 or _port > 65535:
		_wrong = "The url %s does not name a server. It looks like http://127.0.0.1:8000." % url
	elif token != "" and not _header_fits(token, 4096):
		_wrong = "The token cannot be sent in a header."
	elif not fallback in ["error", "repeat", "default"] or (fallback == "default" and default == null):
		_wrong = "fallback is error, repeat or default; the last one with a default."
	elif timeout_ms <= 0 or deadline_ms <= 0 or retries < 0 or max_reply_bytes <= 0:
		_wrong = "An option is out of range: times and sizes are above 0."


# -- blocking requests


# Keys of `about`: session (new for every match; default: generated), match, side, model, version, temperature.
func start(about = {}, body = PackedByteArray()) -> bool:
	return begin_start(about, body) and wait()


func tick(body, within_ms = 0) -> bool:
	return begin_tick(body, within_ms) and wait()


func end(body = PackedByteArray()) -> bool:
	return begin_end(body) and wait()


# GET /spec: the reply is its JSON.
func spec() -> bool:
	return begin_spec() and wait()


# Block until the current request is answered or its time is over.
func wait() -> bool:
	while poll() == BUSY:
		OS.delay_usec(50)
	return _state == DONE


# -- non-blocking requests: call poll() in every frame until it is no longer BUSY


func begin_start(about = {}, body = PackedByteArray()) -> bool:
	if _state == BUSY:
		return _begin("start", body, "", timeout_ms)
	var extra = ""
	for name in about:
		if not name in ["session", "match", "side", "model", "version", "temperature"]:
			return _misused("A start takes no %s." % name)
		if not _header_fits(str(about[name]), 256):
			return _misused("The %s cannot be sent in a header: up to 256 bytes without control characters." % name)
		if name != "session":
			extra += "Ludus-%s: %s\r\n" % [name.capitalize(), about[name]]
	if _kind == "start" and error == "unreachable" and extra == _extra and body == _body and about.get("session", session) == session:
		_last = _number - 1  # repeat the same start
	else:
		var random = Crypto.new().generate_random_bytes(20).hex_encode()
		session = str(about["session"]) if about.has("session") else random.substr(0, 32)
		# Every start has its own number: a new start is never mistaken for the retry of an earlier one with the same id.
		_last = ("0x" + random.substr(32, 7)).hex_to_int()
	_unsure = false
	_open = false
	_good = null
	missed = 0
	return _begin("start", body, extra, timeout_ms)


func begin_spec() -> bool:
	return _begin("spec", PackedByteArray(), "", timeout_ms)


func begin_tick(body, within_ms = 0) -> bool:
	return _begin("tick", body, "", within_ms if within_ms > 0 else deadline_ms)


func begin_end(body = PackedByteArray()) -> bool:
	return _begin("end", body, "", timeout_ms)


func poll() -> int:
	while _state == BUSY:
		if Time.get_ticks_usec() >= _deadline:
			_broken("timed out")
		elif not _advance():
			break
	return _state


# Close the connection. The server ends a session without end() after a minute of silence.
func close() -> void:
	_drop()
	_state = IDLE
	_open = false


# -- the raw format of the built-in actor: little-endian


# Body of the start of a session with raw ticks.
static func raw_start() -> PackedByteArray:
	return "{\"format\": \"raw\"}".to_utf8_buffer()


# Put the leaves of the observation into it, in the order of GET /spec: put_float, put_64 (Discrete), put_u8, put_data …
# The reward belongs to the previous action.
static func raw_begin(reward = 0.0, terminated = false, truncated = false, masked = false) -> StreamPeerBuffer:
	var buffer = StreamPeerBuffer.new()
	buffer.put_float(reward)
	buffer.put_u32((1 if terminated else 0) | (2 if truncated else 0) | (4 if masked else 0))
	return buffer


# Body of the tick. `mask` has one entry per option, if raw_begin was called with a mask.
static func raw_end(buffer: StreamPeerBuffer, mask = []) -> PackedByteArray:
	for allowed in mask:
		buffer.put_u8(1 if allowed else 0)
	return buffer.data_array


# Read the leaves of the action from it: get_64 (Discrete), get_float … It is empty when the episode is over.
static func raw_read(bytes: PackedByteArray) -> StreamPeerBuffer:
	var buffer = StreamPeerBuffer.new()
	buffer.data_array = bytes
	return buffer


# -- one request, with retries


func _begin(kind: String, body: PackedByteArray, extra: String, within_ms: int) -> bool:
	if _state == BUSY:
		return _misused("The request before is not answered yet.")
	if _wrong != "":
		return _misused(_wrong)
	if kind in ["tick", "end"] and not _open:
		return _misused("There is no open session: start first.")
	reply = PackedByteArray()
	fell_back = false
	error = ""
	status = 0
	word = ""
	message = ""
	hint = ""
	_kind = kind
	_body = body
	_extra = extra
	_failures = 0
	_rounds = 0
	_deadline = Time.get_ticks_usec() + within_ms * 1000
	_phase = BEGIN
	_state = BUSY
	return true


# Make one step; false if it has to wait.
func _advance() -> bool:
	match _phase:
		PAUSE:
			if Time.get_ticks_usec() < _until:
				return false
			_phase = BEGIN
		BEGIN:
			_number = _last + 1
			if _stream != null and not _usable():
				_drop()
			if _stream == null:
				_connect()
			else:
				_write()
		RESOLVE:
			return _resolve()
		CONNECT:
			_tcp_poll()
			if _tcp.get_status() == StreamPeerTCP.STATUS_CONNECTING:
				return false
			if _tcp.get_status() != StreamPeerTCP.STATUS_CONNECTED:
				_address = ""  # the address may have changed
				_family = IP.TYPE_NONE
				_broken("nothing listens there")
			else:
				_connected()
		SECURE:
			_stream.poll()
			if _stream.get_status() == StreamPeerTLS.STATUS_HANDSHAKING:
				return false
			if _stream.get_status() != StreamPeerTLS.STATUS_CONNECTED:
				_broken("TLS failed: is the certificate trusted?")
			else:
				_write()
		SEND:
			return _send()
		READ:
			return _read()
	return true


func _pause(ms) -> void:
	_until = Time.get_ticks_usec() + int(ms * 1000)
	_phase = PAUSE


# The attempt failed: retry, or end the request.
func _broken(why: String) -> void:
	_drop()  # later bytes on this connection do not answer the next request
	_unsure = _unsure or _kind in ["tick", "end"]
	if Time.get_ticks_usec() < _deadline and _failures < retries:
		_pause(RETRY_PAUSE_MS * _failures)  # the first retry is immediate: usually an idle connection was closed
		_failures += 1  # same number: it counts once
		return
	_give_up()
	var late = _kind == "tick" and Time.get_ticks_usec() >= _deadline
	_fail("deadline" if late else "unreachable", 0, "", "%s:%d did not answer: %s." % [_host, _port, why],
			"The session goes on." if late else "Is it a Ludus server, and is it running?")
	_miss()


# The request may have counted: its number is not used again, except for an end, which only an identical end may follow.
func _give_up() -> void:
	if _kind == "tick":
		_last = _number


# A whole reply has arrived.
func _answered(code: int, body: PackedByteArray, retry_after) -> void:
	if _head["close"] or _early:
		_drop()
	if code == 200:
		if _kind != "spec":
			_last = _number
			_open = _kind != "end"
		if _kind == "tick":
			_good = body
		reply = body
		_state = DONE
		return
	var refusal = _refusal(code, body)
	if _unsure and code == 409 and _kind in ["tick", "end"]:
		if refusal["word"] == "busy" or refusal["last"] >= 0:
			if refusal["last"] >= 0:
				_last = refusal["last"]
			_pause(0 if refusal["last"] >= 0 and _rounds < 2 else min(MAX_BUSY_PAUSE_MS, 2 * (_rounds + 1)))
			_rounds += 1
			return
	var foreign = code >= 500 and not refusal["ours"]  # from a proxy: the server may have received the request
	var not_now = code in [429, 503] or foreign
	_unsure = _unsure or (foreign and _kind in ["tick", "end"])
	if not_now:
		var pause_ms = RETRY_PAUSE_MS * (_failures + 1) if retry_after == null else retry_after * 1000
		_failures += 1
		if _failures <= retries and Time.get_ticks_usec() + pause_ms * 1000 < _deadline:
			_pause(pause_ms)
			return
		if foreign:
			_give_up()
	var lost = refusal["ours"] and (code in [410, 500, 504] or refusal["word"] == "unknown_session")
	if foreign and code != 503:
		_fail("unreachable", code, "", "%s:%d answered %d, which is no answer of a Ludus server." % [_host, _port, code], "Is it running?")
	else:
		_fail("lost" if lost else "refused", code, refusal["word"], refusal["message"], refusal["hint"])
	if not_now:
		_miss()


func _fail(kind: String, code: int, said: String, what: String, remedy: String) -> void:
	_state = FAILED
	error = kind
	status = code
	word = said
	message = what
	hint = remedy


# A tick was not answered in time: use the fallback, if there is one.
func _miss() -> void:
	if _kind != "tick":
		return
	missed += 1
	fell_back = true
	var instead = null
	if fallback == "repeat":
		instead = default if _good == null else _good
	elif fallback == "default":
		instead = default
	if instead != null:
		reply = instead
		_state = DONE


func _misused(what: String) -> bool:
	error = "usage"
	status = 0
	word = "usage"
	message = what
	hint = ""
	if _state != BUSY:
		_state = FAILED
	return false


# -- the connection


func _connect() -> void:
	if _host.is_valid_ip_address():
		_address = _host
	if _address != "":
		_tcp = StreamPeerTCP.new()
		if _tcp.connect_to_host(_address, _port) == OK:
			_phase = CONNECT
		else:
			_broken("it cannot be connected to")
		return
	_family = IP.TYPE_IPV6 if _family == IP.TYPE_IPV4 else IP.TYPE_IPV4  # try the other family if the first has no address
	_resolving = IP.resolve_hostname_queue_item(_host, _family)
	if _resolving == IP.RESOLVER_INVALID_ID:
		_broken("too many names are being resolved")
	else:
		_phase = RESOLVE


func _resolve() -> bool:
	if IP.get_resolve_item_status(_resolving) == IP.RESOLVER_STATUS_WAITING:
		return false
	_address = IP.get_resolve_item_address(_resolving)
	IP.erase_resolve_item(_resolving)
	_resolving = -1
	if _address == "" and _family == IP.TYPE_IPV6:
		_broken("the host is not known")
	else:
		_connect()
	return true


func _connected() -> void:
	_tcp.set_no_delay(true)
	if not _tls:
		_stream = _tcp
		_write()
		return
	_stream = StreamPeerTLS.new()
	if _stream.connect_to_stream(_tcp, _host, TLSOptions.client(certificate)) == OK:
		_phase = SECURE
	else:
		_broken("TLS failed: is the certificate trusted?")


func _tcp_poll() -> void:
	_tcp.poll()


# Nothing arrived since the last reply: neither unsolicited bytes nor the end of the stream.
func _usable() -> bool:
	_tcp_poll()
	if _tcp.get_status() != StreamPeerTCP.STATUS_CONNECTED:
		return false
	if _tls:
		return true
	var got = _tcp.get_partial_data(1)
	return got[0] == OK and got[1].size() == 0


func _drop() -> void:
	if _resolving >= 0:
		IP.erase_resolve_item(_resolving)
		_resolving = -1
	if _tcp != null:
		_tcp.disconnect_from_host()
	_tcp = null
	_stream = null
	_buffer = PackedByteArray()


func _write() -> void:
	var common = " HTTP/1.1\r\nHost: %s\r\n" % _authority
	if token != "":
		common += "Authorization: Bearer %s\r\n" % token
	if _kind == "spec":
		_request = ("GET " + _path + "/spec" + common + "\r\n").to_utf8_buffer()
	else:
		_request = ("POST " + _path + "/step" + common + "Ludus-Session: " + session + "\r\nLudus-Step: " + _kind + "\r\nLudus-Seq: "
				+ str(_number) + "\r\n" + _extra + "Content-Length: " + str(_body.size()) + "\r\n\r\n").to_utf8_buffer()
		_request.append_array(_body)
	_sent = 0
	_early = false
	_buffer = PackedByteArray()
	_head = {}
	_chunks = PackedByteArray()
	_phase = SEND


func _send() -> bool:
	if _tls:
		_stream.poll()
	var part = _request if _sent == 0 else _request.slice(_sent)
	var put = _stream.put_partial_data(part)
	_sent += put[1]
	if put[0] != OK or (put[1] == 0 and _sent < _request.size()):
		if not _tls and _tcp.get_available_bytes() > 0:  # an answer before everything was sent: the server refuses the rest
			_early = true
			_phase = READ
			return true
		if put[0] == OK:
			return false
		_broken("the connection broke")
		return true
	if _sent < _request.size():
		return true
	_request = PackedByteArray()
	_phase = READ
	return true


func _read() -> bool:
	if _tls:
		_stream.poll()
	else:
		_tcp_poll()
	var got = _stream.get_partial_data(int(clamp(_stream.get_available_bytes(), 1, 1 << 20)))
	if got[1].size() > 0:
		_buffer.append_array(got[1])
		_parse()
		return true
	if got[0] != OK or _tcp.get_status() != StreamPeerTCP.STATUS_CONNECTED:
		_broken("the connection was closed by the server")
		return true
	return false


# -- replies


# Look for a whole reply in the received bytes.
func _parse() -> void:
	while _head.is_empty():
		var opening = "HTTP/1.".to_ascii_buffer()
		for i in range(min(opening.size(), _buffer.size())):
			if _buffer[i] != opening[i]:
				_broken("what came back is not HTTP/1.1")
				return
		# A string ends at its first zero byte; no head has one.
		var text = _buffer.slice(0, MAX_HEAD).get_string_from_ascii()
		var end = text.find("\r\n\r\n")
		if end < 0:
			if _buffer.size() >= MAX_HEAD:
				_broken("the headers of a reply are too long")
			return
		_head = _parse_head(text.substr(0, end))
		if _head["wrong"] != "":
			_broken(_head["wrong"])
			return
		_cut(end + 4)
		if _head["status"] < 200:  # 100 Continue
			_head = {}
			_rounds += 1
			if _rounds > 100:
				_broken("it continues for ever")
				return
			if _buffer.size() == 0:
				return
	if _head["chunked"]:
		if not _parse_chunks():
			return
	elif _buffer.size() < _head["length"]:
		return
	else:
		_chunks = _buffer if _buffer.size() == _head["length"] else PackedByteArray()
		_cut(_head["length"])
	if _buffer.size() > 0:
		_broken("more came back than was asked for")
	else:
		_answered(_head["status"], _chunks, _head["retry_after"])


func _cut(count: int) -> void:
	_buffer = _buffer.slice(count) if count < _buffer.size() else PackedByteArray()


func _parse_head(text: String) -> Dictionary:
	var head = {"wrong": "", "status": 0, "length": -1, "chunked": false, "close": false, "retry_after": null}
	var lines = text.split("\r\n")
	var first = lines[0]
	var code = first.substr(9, 3)
	if not first.substr(0, 9) in ["HTTP/1.1 ", "HTTP/1.0 "] or not _is_number(code, 3) or int(code) < 100 or not first.substr(12, 1) in ["", " "]:
		head["wrong"] = "what came back is not HTTP/1.1"
		return head
	head["status"] = int(code)
	head["close"] = first.begins_with("HTTP/1.0")
	for i in range(1, lines.size()):
		var colon = lines[i].find(":")
		var name = lines[i].substr(0, colon).to_lower()
		var value = lines[i].substr(colon + 1).strip_edges()
		if colon < 1:
			head["wrong"] = "a header came without a name"
		elif name == "content-length":
			if not _is_number(value, 12) or (head["length"] >= 0 and head["length"] != int(value)):
				head["wrong"] = "the Content-Length is not usable"
			elif int(value) > max_reply_bytes:
				head["wrong"] = "a reply of %s bytes is too long" % value
			else:
				head["length"] = int(value)
		elif name == "transfer-encoding":
			if head["chunked"] or value.to_lower() != "chunked":
				head["wrong"] = "the Transfer-Encoding is not chunked"
			head["chunked"] = true
		elif name == "connection" and value.to_lower() == "close":
			head["close"] = true
		elif name == "retry-after" and value.is_valid_float():
			head["retry_after"] = max(0.0, float(value))
	if head["chunked"] and head["length"] >= 0:
		head["wrong"] = "a reply came with a length and in chunks"
	elif not head["chunked"] and head["length"] < 0 and head["status"] >= 200:
		if head["status"] in [204, 304]:
			head["length"] = 0
		elif head["wrong"] == "":
			head["wrong"] = "a reply %d came without a Content-Length" % head["status"]
	return head


# Move whole chunks from the buffer to _chunks; true after the last one and its trailers.
func _parse_chunks() -> bool:
	while true:
		var text = _buffer.slice(0, MAX_HEAD).get_string_from_ascii() if _buffer.size() > 0 else ""
		var end = text.find("\r\n")
		var digits = text.substr(0, end).split(";")[0].strip_edges() if end >= 0 else ""
		if end < 0:
			if text.length() > 256:
				_broken("the size of a chunk is too long")
			return false
		if digits.length() < 1 or digits.length() > 8 or not ("0x" + digits).is_valid_hex_number(true) or digits[0] in "+-":
			_broken("the size of a chunk is not usable")
			return false
		var size = ("0x" + digits).hex_to_int()
		if size == 0:
			var over = text.find("\r\n\r\n", end)  # the one after the size itself, if there are no trailers
			if over >= 0:
				_cut(over + 4)
			elif _buffer.size() >= MAX_HEAD:
				_broken("the trailers of a reply are too long")
			return over >= 0
		if _chunks.size() + size > max_reply_bytes:
			_broken("a reply of more than %d bytes is too long" % max_reply_bytes)
			return false
		if _buffer.size() < end + 2 + size + 2:
			return false
		if _buffer[end + 2 + size] != 13 or _buffer[end + 3 + size] != 10:
			_broken("a chunk is longer than its size")
			return false
		_chunks.append_array(_buffer.slice(end + 2, end + 2 + size))
		_cut(end + 4 + size)
	return false


# Contents of a reply that is not 200; `ours` is false if it is not from a Ludus server.
func _refusal(code: int, body: PackedByteArray) -> Dictionary:
	var found = {"ours": false, "word": "http", "message": "The server answered %d." % code, "hint": "", "last": -1}
	if body.size() == 0 or body.size() > 65536 or body[0] != 123:
		return found
	var text = body.get_string_from_utf8()
	if text.split("[").size() + text.split("{").size() > 32:  # the parser is recursive, and the JSON of a Ludus server is flat
		return found
	var parser = JSON.new()  # unlike JSON.parse_string it logs no errors
	if parser.parse(text) != OK or not parser.data is Dictionary:
		return found
	var said = parser.data
	if said.get("error") is String and said.get("message") is String:
		found["ours"] = true
		found["word"] = said["error"]
		found["message"] = said["message"]
		if said.get("hint") is String:
			found["hint"] = said["hint"]
		var last = said.get("last")
		if last is float and last >= 0 and last < MAX_NUMBER and said["error"] == "seq":
			found["last"] = int(last)
	return found


static func _is_number(text: String, digits: int) -> bool:
	if text.length() < 1 or text.length() > digits:
		return false
	for character in text:
		if not character in "0123456789":
			return false
	return true


static func _header_fits(text: String, bytes: int) -> bool:
	if text == "" or text.to_utf8_buffer().size() > bytes or text != text.strip_edges():
		return false
	for i in range(text.length()):
		if text.unicode_at(i) < 32 or text.unicode_at(i) == 127:
			return false
	return true
