# Pucks that slide to their targets, in the engine's 2D physics, for Godot 3. Speaks the protocol of Godot RL Agents.
#
# Every puck is an agent on its own layer. It is pushed by its action, and its episode ends at the target or after 100 actions.
extends Node2D

const AGENTS = 4
const RANGE = 200.0
const FORCE = 400.0
const MAX_ACTIONS = 100


class Puck extends RigidBody2D:
	var target = Vector2()
	var push = Vector2()
	var reward = 0.0
	var done = false
	var actions = 0
	var distance = 0.0

	func _physics_process(delta):
		apply_central_impulse(push * delta)


var arguments = {"port": "11008", "env_seed": "1", "action_repeat": "4"}
var random = RandomNumberGenerator.new()
var stream = StreamPeerTCP.new()
var pucks = []
var frames = 0
var owed = ""  # the message that is due after the frames of an action


func _ready():
	for argument in OS.get_cmdline_args():
		var parts = argument.trim_prefix("--").split("=")
		if parts.size() == 2:
			arguments[parts[0]] = parts[1]
	random.seed = int(arguments["env_seed"])
	for i in range(AGENTS):
		pucks.append(null)
		place(i)
	stream.connect_to_host("127.0.0.1", int(arguments["port"]))
	while stream.get_status() == StreamPeerTCP.STATUS_CONNECTING:
		OS.delay_msec(1)
	stream.set_no_delay(true)
	var message = read()
	if message == null or message["type"] != "handshake":
		printerr("no handshake")
		get_tree().quit()
		return
	read()  # env_info
	var observed = []
	var acting = []
	for _i in range(AGENTS):
		observed.append({"obs": {"size": [4], "space": "box"}})
		acting.append({"move": {"size": 2, "action_type": "continuous"}, "brake": {"size": 2, "action_type": "discrete"}})
	send({"type": "env_info", "observation_space": observed, "action_space": acting, "n_agents": AGENTS})
	print("ready")


func place(i):
	var puck = Puck.new()
	if pucks[i] != null:
		puck.reward = pucks[i].reward
		puck.done = pucks[i].done
		pucks[i].free()
	pucks[i] = puck
	var shape = CollisionShape2D.new()
	shape.shape = CircleShape2D.new()
	puck.add_child(shape)
	puck.gravity_scale = 0
	puck.collision_layer = 1 << i
	puck.collision_mask = 1 << i
	puck.linear_damp = 1
	puck.can_sleep = false
	puck.position = Vector2(random.randf_range(-RANGE, RANGE), random.randf_range(-RANGE, RANGE))
	puck.target = Vector2(random.randf_range(-RANGE, RANGE), random.randf_range(-RANGE, RANGE))
	puck.distance = puck.position.distance_to(puck.target)
	add_child(puck)


func _physics_process(_delta):
	update()
	if frames > 0:
		frames -= 1
		return
	if owed == "step":
		answer_step()
	elif owed == "reset":
		send({"type": "reset", "obs": observe()})
	owed = ""
	var message = read()
	if message == null or message["type"] == "close":
		set_physics_process(false)
		get_tree().quit()
	elif message["type"] == "reset":
		for i in range(AGENTS):
			place(i)
			pucks[i].reward = 0.0
			pucks[i].done = false
		owed = "reset"
	elif message["type"] == "action":
		for i in range(AGENTS):
			var action = message["action"][i]
			pucks[i].push = Vector2(action["move"][0], action["move"][1]) * FORCE
			pucks[i].linear_damp = 5 if action["brake"] == 1 else 1
		owed = "step"
		frames = int(arguments["action_repeat"]) - 1


func _draw():
	for i in range(AGENTS):
		var color = Color.from_hsv(i / float(AGENTS), 0.7, 0.9)
		draw_circle(Vector2(512, 300) + pucks[i].position, 10, color)
		draw_arc(Vector2(512, 300) + pucks[i].target, 25, 0, TAU, 32, color, 2)


func answer_step():
	for i in range(AGENTS):
		var puck = pucks[i]
		var distance = puck.position.distance_to(puck.target)
		puck.reward += (puck.distance - distance) / RANGE
		puck.distance = distance
		puck.actions += 1
		if distance < 25:
			puck.reward += 1.0
		if distance < 25 or puck.actions >= MAX_ACTIONS:
			puck.done = true
			place(i)
	var rewards = []
	var done = []
	for puck in pucks:
		rewards.append(puck.reward)
		done.append(puck.done)
		puck.reward = 0.0
		puck.done = false
	send({"type": "step", "obs": observe(), "reward": rewards, "done": done})


func observe():
	var seen = []
	for puck in pucks:
		var way = (puck.target - puck.position) / RANGE
		seen.append({"obs": [way.x, way.y, puck.linear_velocity.x / RANGE, puck.linear_velocity.y / RANGE]})
	return seen


func read():
	while stream.get_available_bytes() == 0:
		if stream.get_status() != StreamPeerTCP.STATUS_CONNECTED:
			return null
		OS.delay_usec(20)
	return JSON.parse(stream.get_utf8_string()).result


func send(message):
	stream.put_utf8_string(JSON.print(message))
