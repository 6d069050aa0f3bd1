# Balance a pole on a cart, simulated by the engine's physics, by pushing the cart left or right.
#
#     godot3 --path clients/gdscript/example --keys                                        play with the arrow keys
#     ludus train -f examples/cartpole_http/cartpole.yaml                                  then, as fast as possible:
#     godot3-server --path clients/gdscript/example --fixed-fps 60 --matches=3000
#     ludus serve RUN                                                                      then, live:
#     godot3 --path clients/gdscript/example --deadline=12
#     ludus gamecore serve --games examples/gamecore/catalogue.yaml                        or let a gamecore server start it
#
# In training the game waits for every action. Live (--deadline, in milliseconds) it never waits longer than the deadline: a late action
# is replaced by the previous one. A gamecore server configures the game by environment variables (docs/gamecore.md); without an actor the
# game then plays by a built-in rule.
extends Node2D

const Ludus = preload("res://ludus.gd")
const METRE = 100.0
const PUSH = 10.0

var options = {"url": "http://127.0.0.1:8000", "token": "", "matches": "1", "deadline": "0", "seed": "0"}
var keys = false
var alone = false  # no server: the built-in rule plays
var about = {}
var limit = 500
var played = []  # frames of every match
var ludus
var random = RandomNumberGenerator.new()
var cart
var pole
var frames = 0
var matches = 0


class Cart extends RigidBody2D:
	# Keep the cart on its rail.
	func _integrate_forces(state):
		state.linear_velocity.y = 0
		state.transform.origin.y = 0


func _ready():
	for argument in OS.get_cmdline_args():
		var parts = argument.trim_prefix("--").split("=")
		keys = keys or argument == "--keys"
		if parts.size() == 2 and options.has(parts[0]):
			options[parts[0]] = parts[1]
	var asked = {}
	if OS.get_environment("LUDUS_GAME_CONFIG") != "":
		read_config(asked)
	random.seed = int(options["seed"])
	asked["token"] = options["token"]
	if int(options["deadline"]) > 0:
		asked["deadline_ms"] = int(options["deadline"])
		asked["fallback"] = "repeat"
		asked["default"] = PoolByteArray([0, 0, 0, 0, 0, 0, 0, 0])  # action 0, left: an action of this game is an int64
	ludus = Ludus.new(options["url"], asked)
	position = Vector2(512, 400)
	begin()


# Read the order of a gamecore server. The first camp is this game's only one.
func read_config(asked):
	var file = File.new()
	var told = null
	if file.open(OS.get_environment("LUDUS_GAME_CONFIG"), File.READ) == OK:
		told = JSON.parse(file.get_as_text()).result
		file.close()
	if not told is Dictionary:
		printerr("LUDUS_GAME_CONFIG does not name a file with what is to be played")
		OS.exit_code = 2
		get_tree().quit()
		alone = true
		return
	about = {"match": told["runtime_id"]}
	options["seed"] = str(told["seed"])
	options["matches"] = str(told["options"].get("matches", 1))
	options["token"] = OS.get_environment("LUDUS_GAME_TOKEN_0")
	if told["max_frames"] != null:
		limit = int(min(limit, told["max_frames"]))
	alone = told["camps"].empty() or told["camps"][0] == null
	if not alone:
		options["url"] = told["camps"][0]["url"]
		asked["timeout_ms"] = int(told["camps"][0]["timeout_s"] * 1000)
		asked["deadline_ms"] = asked["timeout_ms"]


# Write the result for the server: to a temporary file first, so that it appears whole or not at all.
func write_result():
	var path = OS.get_environment("LUDUS_GAME_RESULT")
	if path == "":
		return
	var stood = played.min() >= limit
	var file = File.new()
	if file.open(path + ".tmp", File.WRITE) != OK:
		printerr("the result cannot be written: ", path)
		OS.exit_code = 1
		return
	file.store_string(JSON.print({"winner": 0 if stood else null, "frames": played, "player": "script" if alone else "actor"}))
	file.close()
	Directory.new().rename(path + ".tmp", path)


func begin():
	for body in [cart, pole]:
		if body != null:
			body.free()
	cart = Cart.new()
	cart.mode = RigidBody2D.MODE_CHARACTER
	cart.gravity_scale = 0
	pole = RigidBody2D.new()
	pole.mass = 0.1
	pole.position = Vector2(0, -METRE / 2)
	pole.angular_velocity = random.randf_range(-0.05, 0.05)
	for body in [cart, pole]:
		var shape = CollisionShape2D.new()
		shape.shape = RectangleShape2D.new()
		shape.shape.extents = Vector2(20, 10) if body == cart else Vector2(2, METRE / 2)
		body.add_child(shape)
		body.collision_layer = 0
		body.collision_mask = 0
		body.linear_damp = 0
		body.angular_damp = 0
		body.can_sleep = false
		add_child(body)
	var joint = PinJoint2D.new()
	cart.add_child(joint)
	joint.node_a = cart.get_path()
	joint.node_b = pole.get_path()
	frames = 0
	if asks() and not ludus.start(about, Ludus.raw_start()):
		give_up()


func _physics_process(_delta):
	if fell() or frames >= limit:
		finish()
		return
	var action = 0
	if keys:
		action = 1 if Input.is_action_pressed("ui_right") else 0
	elif alone:
		action = 1 if pole.rotation + 0.3 * pole.angular_velocity + 0.0005 * cart.position.x + 0.001 * cart.linear_velocity.x > 0 else 0
	elif not ludus.tick(seen(0.0 if frames == 0 else 1.0, false)):
		if ludus.error == "lost":
			begin()
		else:
			give_up()
		return
	else:
		action = Ludus.raw_read(ludus.reply).get_64()
	cart.applied_force = Vector2(PUSH * METRE * (1 if action == 1 else -1), 0)
	frames += 1
	update()


func asks() -> bool:
	return not keys and not alone


func fell() -> bool:
	return abs(cart.position.x) > 2.4 * METRE or abs(pole.rotation) > 0.21


# Observation in the raw format. The reward belongs to the previous action.
func seen(reward: float, last: bool) -> PoolByteArray:
	var buffer = Ludus.raw_begin(reward, last and fell(), last and not fell())
	buffer.put_float(cart.position.x / METRE)
	buffer.put_float(cart.linear_velocity.x / METRE)
	buffer.put_float(pole.rotation)
	buffer.put_float(pole.angular_velocity)
	return Ludus.raw_end(buffer)


func finish():
	matches += 1
	played.append(frames)
	print("match %d: %d frames, %d missed" % [matches, frames, ludus.missed])
	if asks() and not ludus.end(seen(1.0, true)) and ludus.error != "lost":
		give_up()
	elif matches >= int(options["matches"]):
		write_result()
		set_physics_process(false)
		get_tree().quit()
	else:
		begin()


func give_up():
	printerr("%s %s %s" % [ludus.error, ludus.message, ludus.hint])
	set_physics_process(false)
	OS.exit_code = 1
	get_tree().quit()


func _draw():
	draw_line(Vector2(-2.4 * METRE, 0), Vector2(2.4 * METRE, 0), Color.gray, 2)
	if cart != null:
		draw_rect(Rect2(cart.position - Vector2(20, 10), Vector2(40, 20)), Color.steelblue)
		draw_line(cart.position, cart.position + Vector2(0, -METRE).rotated(pole.rotation), Color.orange, 5)
