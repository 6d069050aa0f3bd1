# Does what it is told, one command per line, and tells what came of it: see tests/clients/driving.py.
extends SceneTree

const Ludus = preload("res://ludus.gd")

var ludus = null
var command = {}
var since = 0
var waiting = false  # for poll(), frame by frame


var orders = StreamPeerTCP.new()
var heard = ""


func _init():
	Engine.physics_ticks_per_second = 1000
	Engine.max_fps = 1000
	orders.connect_to_host("127.0.0.1", int(OS.get_environment("LUDUS_DRIVER")))


func _process(_delta):
	if waiting:
		var polled = ludus.poll()
		if polled == Ludus.BUSY:
			return false
		waiting = false
		tell(polled == Ludus.DONE)
		return false
	orders.poll()
	if orders.get_status() == StreamPeerTCP.STATUS_CONNECTING:
		return false
	if orders.get_status() != StreamPeerTCP.STATUS_CONNECTED:
		return true
	if orders.get_available_bytes() > 0:
		heard += orders.get_utf8_string(orders.get_available_bytes())
	var line = heard.substr(0, heard.find("\n")) if "\n" in heard else ""
	if line == "":
		return false
	heard = heard.substr(line.length() + 1)
	since = Time.get_ticks_usec()
	command = {}
	var words = line.split(" ")
	for i in range(1, words.size()):
		var sign_at = words[i].find("=")
		command[words[i].substr(0, sign_at)] = words[i].substr(sign_at + 1)
	perform(words[0])
	return false


func perform(name):
	var body = unhex(command.get("body", ""))
	body.resize(int(command.get("zeros", str(body.size()))))
	var later = command.get("async") == "1"
	var within_ms = int(command.get("deadline_ms", "0"))
	var about = {}
	for key in ["session", "match", "side", "model", "version", "temperature"]:
		if command.has(key):
			about[key] = command[key]
	if about.has("version"):
		about["version"] = int(about["version"])
	if about.has("temperature"):
		about["temperature"] = float(about["temperature"])
	match name:
		"open":
			tell(make())
		"spec":
			tell(ludus.spec())
		"raw":
			tell(raw())
		"start":
			go_on(ludus.begin_start(about, body)) if later else tell(ludus.start(about, body))
		"tick":
			go_on(ludus.begin_tick(body, within_ms)) if later else tell(ludus.tick(body, within_ms))
		"end":
			go_on(ludus.begin_end(body)) if later else tell(ludus.end(body))


func make():
	if ludus != null:
		ludus.close()
	var options = {}
	for key in ["token", "fallback"]:
		if command.has(key):
			options[key] = command[key]
	for key in ["timeout_ms", "deadline_ms", "retries", "max_reply_bytes"]:
		if command.has(key):
			options[key] = int(command[key])
	if command.has("default"):
		options["default"] = unhex(command["default"])
	if command.has("certificate"):
		options["certificate"] = X509Certificate.new()
		options["certificate"].load(command["certificate"])
	ludus = Ludus.new(command["url"], options)
	if ludus._wrong == "":
		return true
	ludus.error = "usage"
	return false


# Written, sent to an actor that echoes it, and read again.
func raw():
	var buffer = Ludus.raw_begin(-1.5, false, true, true)
	buffer.put_float(0.25)
	buffer.put_float(-3)
	buffer.put_64(-2)
	buffer.put_u8(200)
	buffer.put_32(7)
	buffer.put_double(0.1)
	buffer.put_data(PackedByteArray([1, 2]))
	if not ludus.tick(Ludus.raw_end(buffer, [true, false, true])):
		return false
	var got = Ludus.raw_read(ludus.reply)
	return (got.get_float() == -1.5 and got.get_u32() == 6 and got.get_float() == 0.25 and got.get_float() == -3
			and got.get_64() == -2 and got.get_u8() == 200 and got.get_32() == 7 and got.get_double() == 0.1
			and got.get_available_bytes() == 5)


func go_on(begun):
	if begun:
		waiting = true
	else:
		tell(false)


func tell(good):
	var said = "= ok x" + ludus.reply.hex_encode()
	if not good:
		said = "= %s x%s status=%d word=%s hint=x%s" % [ludus.error, ludus.message.to_utf8_buffer().hex_encode(), ludus.status, ludus.word,
				ludus.hint.to_utf8_buffer().hex_encode()]
	said += " missed=%d flag=%d ms=%d\n" % [ludus.missed, int(ludus.fell_back), (Time.get_ticks_usec() - since) / 1000]
	orders.put_data(said.to_utf8_buffer())


func unhex(text):
	var data = PackedByteArray()
	for i in range(0, text.length(), 2):
		data.append(("0x" + text.substr(i, 2)).hex_to_int())
	return data
