# An agent of Ludus as a node, for Godot 4. It asks a Ludus server for the actions of its parent, which has these methods:
#
#     func get_observation():          # an Array of numbers, in the order of the observation space
#     func set_action(action):         # Discrete: an int; Box: an Array of numbers; several parts: an Array of both
#     func begin_episode():            # put everything to its start
#     func get_action_mask():          # if the game has one: an Array with a value per option, 0 or false = forbidden
#     func choose_action():            # if the game can play by itself, with `scripted`: an action as set_action gets it
#
# In its _physics_process, or anywhere else, the parent calls
#
#     $LudusAgent.add_reward(0.1)
#     $LudusAgent.end_episode()        # it is over; end_episode(true): it was cut by a limit of time or steps
#
# The node sends the observation every `decision_period` physics frames, after the parent's _physics_process. Spaces are read from the
# server; an episode is one session (docs/protocol.md). While the server is away it is tried again every second. The token is read from
# the environment variable LUDUS_TOKEN.
extends Node
class_name LudusAgent

const Ludus = preload("ludus.gd")
const RETRY_MS = 1000

signal acted(action)  # the parent has got it
signal episode_ended(episode_return, decisions)
signal failed(error, message, hint)  # kinds of errors: see ludus.gd

@export var url = "http://127.0.0.1:8000"
@export var model = ""  # which of several models plays
@export var synchronous = true  # a frame waits for its action; false: the action is set when it has arrived, in a later frame
@export_range(1, 1000) var decision_period = 1
@export var deadline_ms = 10000  # of an action
@export_enum("error", "repeat") var fallback = "error"  # when it is missed: keep the action that is set, or set the last one again
@export var active = true
@export var scripted = false  # without a server: the parent chooses its actions itself

var token = OS.get_environment("LUDUS_TOKEN")  # not exported: scene files would contain it
var options = {}  # further options of ludus.gd
var about = {}  # keys of a start: match, side, version, temperature
var missed = 0  # decisions that missed their deadline

var _client = null
var _pending = ""  # the request that is not answered yet
var _retry_at = 0
var _losses = 0  # of sessions, since the last action
var _observed = []  # leaves of the observation space: [kind, count]
var _acting = []
var _playing = false
var _frames = 0  # since the last decision
var _reward = 0.0  # since the last decision
var _total = 0.0
var _decisions = 0
var _over = false
var _last = null  # body of the end


func add_reward(reward) -> void:
	if not _over:
		_reward += reward
		_total += reward


func end_episode(truncated = false) -> void:
	if _over or not (_playing or scripted):
		return
	_over = true
	if not scripted:
		_last = _body(true, truncated)
		if _last == null:
			_last = PackedByteArray()  # without the last reward, which is then not learned from


func _physics_process(_delta):
	_frames += 1
	if active and scripted:
		_play_script()
	elif active:
		while active and _step():
			pass


# Close the connection. The server ends the session after a minute of silence.
func _exit_tree():
	if _client != null:
		_client.close()


func _play_script() -> void:
	if _over or not _playing:
		if _over:
			emit_signal("episode_ended", _total, _decisions)
		_begin()
	if _frames >= decision_period:
		_frames = 0
		_act(get_parent().choose_action())


# One request or its answer; false when there is nothing more to do in this frame.
func _step() -> bool:
	if _pending != "":
		if synchronous:
			_client.wait()
		if _client.poll() == Ludus.BUSY:
			return false
		var asked = _pending
		_pending = ""
		return _answered(asked)
	if Time.get_ticks_msec() < _retry_at:
		return false
	if _client == null:
		_open()
	if _acting.is_empty():
		return _sent("spec", _client.begin_spec())
	if not _playing:
		return _sent("start", _client.begin_start(_about(), Ludus.raw_start()))
	if _over:
		return _sent("end", _client.begin_end(_last))
	if _frames < decision_period:
		return false
	var body = _body(false, false)
	if body == null:
		return false
	_frames = 0
	_reward = 0.0
	return _sent("tick", _client.begin_tick(body))


func _sent(kind: String, began: bool) -> bool:
	if began:
		_pending = kind
	else:
		_failed(_client.error, _client.message, _client.hint)
	return began


func _answered(kind: String) -> bool:
	if _client.error != "" and not _client.fell_back:
		return _handle_failure(kind)
	match kind:
		"spec":
			return _read_spec()
		"start":
			_begin()
			return true
		"end":
			_playing = false
			emit_signal("episode_ended", _total, _decisions)
			return true
	if _client.fell_back:
		missed += 1
	else:
		_losses = 0
	if _over:
		return true
	_act(_read_action(_client.reply))
	return false


# A lost session is replaced, at once if the one before had an action; a missed deadline leaves the action that is set; an end is
# repeated if that may help.
func _handle_failure(kind: String) -> bool:
	if _client.error == "deadline":
		missed += 1
		return false
	var again = kind == "end" and (_client.error == "unreachable" or _client.status in [429, 503])
	if not again:
		_playing = false
		_over = false
	if _client.error == "lost":
		_losses += 1
		if _losses == 1:
			return true
	_failed(_client.error, _client.message, _client.hint)
	return false


func _failed(error: String, message: String, hint: String) -> void:
	_retry_at = Time.get_ticks_msec() + RETRY_MS
	if get_signal_connection_list("failed").is_empty():
		printerr("%s %s %s" % [error, message, hint])
	emit_signal("failed", error, message, hint)


func _open() -> void:
	var chosen = options.duplicate()
	chosen["token"] = token
	chosen["deadline_ms"] = deadline_ms
	chosen["fallback"] = fallback
	_client = Ludus.new(url, chosen)


func _about() -> Dictionary:
	var named = about.duplicate()
	if model != "":
		named["model"] = model
	return named


func _begin() -> void:
	_playing = true
	_over = false
	_last = null
	_reward = 0.0
	_total = 0.0
	_decisions = 0
	_frames = decision_period
	get_parent().begin_episode()


func _act(action) -> void:
	_decisions += 1
	get_parent().set_action(action)
	emit_signal("acted", action)


# -- bodies in the raw format


# Null if the observation does not fit.
func _body(last: bool, truncated: bool):
	var given = get_parent().get_observation()
	var expected = 0
	for leaf in _observed:
		expected += leaf[1]
	if given.size() != expected:
		_failed("usage", "The observation has %d numbers, the server expects %d." % [given.size(), expected], "Compare GET /spec.")
		return null
	var masked = not last and get_parent().has_method("get_action_mask")
	var buffer = Ludus.raw_begin(_reward, last and not truncated, truncated, masked)
	var at = 0
	for leaf in _observed:
		for i in range(at, at + leaf[1]):
			match leaf[0]:
				"float":
					buffer.put_float(given[i])
				"u8":
					buffer.put_u8(int(given[i]))
				_:
					buffer.put_64(int(given[i]))
		at += leaf[1]
	return Ludus.raw_end(buffer, get_parent().get_action_mask() if masked else [])


func _read_action(reply):
	var buffer = Ludus.raw_read(reply)
	var parts = []
	for leaf in _acting:
		var numbers = []
		for _i in range(leaf[1]):
			match leaf[0]:
				"float":
					numbers.append(buffer.get_float())
				"u8":
					numbers.append(buffer.get_u8())
				_:
					numbers.append(buffer.get_64())
		parts.append(numbers[0] if leaf[2] else numbers)
	return parts[0] if parts.size() == 1 else parts


func _read_spec() -> bool:
	var spec = JSON.parse_string(_client.reply.get_string_from_utf8())
	if spec is Dictionary and model != "" and spec.get("models") is Dictionary:
		spec = spec["models"].get(model)
	if not spec is Dictionary or not spec.has("observation_space") or not spec.has("action_space"):
		_failed("usage", "The server declares no spaces.", "Does it train or serve this game?")
		return false
	_observed = _leaves(spec["observation_space"])
	_acting = _leaves(spec["action_space"])
	for leaf in _observed + _acting:
		if leaf[0] == "":
			_acting = []
			_failed("usage", "This node cannot send %s." % leaf[2], "Use ludus.gd itself.")
	return not _acting.is_empty()


# Leaves of a space in their order: [kind, count, whether it is a single number].
static func _leaves(space: Dictionary) -> Array:
	var kind = space["type"]
	if kind == "Discrete":
		return [["64", 1, true]]
	if kind == "MultiDiscrete":
		return [["64", _flat(space["nvec"]), false]]
	if kind == "MultiBinary":
		return [["u8", _product(space["shape"]), false]]
	if kind == "Box" and space["dtype"].begins_with("float"):
		return [["float", _product(space["shape"]), false]]
	if kind == "Box" and space["dtype"] == "uint8":
		return [["u8", _product(space["shape"]), false]]
	if not kind in ["Dict", "Tuple"]:
		return [["", 0, "a %s of %s" % [kind, space.get("dtype", "")]]]
	var parts = space["spaces"]
	var order = range(parts.size())
	if kind == "Dict":
		order = parts.keys()
		order.sort()
	var leaves = []
	for key in order:
		leaves += _leaves(parts[key])
	return leaves


static func _product(shape: Array) -> int:
	var count = 1
	for size in shape:
		count *= int(size)
	return count


static func _flat(values) -> int:
	if not values is Array:
		return 1
	var count = 0
	for value in values:
		count += _flat(value)
	return count
