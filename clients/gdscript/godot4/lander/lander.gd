# A lander in the engine's 2D physics: gravity, an engine below it, and two that turn it. It has to stand still on the pad.
#
#     godot --path clients/gdscript/godot4/lander --player=keys                    play with the arrow keys
#     godot --headless --path clients/gdscript/godot4/lander --fixed-fps 60 --player=script --episodes=100
#     ludus train -f clients/gdscript/godot4/lander/lander.yaml                    then, as fast as possible:
#     godot --headless --path clients/gdscript/godot4/lander --fixed-fps 60 --episodes=100000
#     ludus serve RUN                                                       then, live:
#     godot --path clients/gdscript/godot4/lander --async
extends Node2D

const SIZE = Vector2(28, 20)
const PAD = 40.0  # half of its width
const WIDTH = 500.0  # further away it is lost
const HEIGHT = 600.0
const START = 300.0  # above the ground
const MAIN = 220.0  # acceleration of the engine below; gravity is 98
const TURN = 350.0  # torque of the engines at the sides
const SAFE_SPEED = 40.0
const SAFE_ANGLE = 0.3
const MAX_FRAMES = 900

enum { NOTHING, MAIN_ENGINE, TURN_LEFT, TURN_RIGHT }

var random = RandomNumberGenerator.new()
var mode = "agent"  # or keys, script, random
var episodes = 1000000
var played = 0
var outcome = ""
var action = NOTHING
var body
var speed = 0.0  # in the frame before
var potential = 0.0
var frames = 0

@onready var agent = $LudusAgent


func _ready():
	for argument in OS.get_cmdline_args():
		var parts = argument.trim_prefix("--").split("=")
		match parts[0]:
			"player":
				mode = parts[1]
			"async":
				agent.synchronous = false
			"url":
				agent.url = parts[1]
			"seed":
				random.seed = int(parts[1])
			"episodes":
				episodes = int(parts[1])
	agent.scripted = mode != "agent"
	agent.connect("episode_ended", _on_episode_ended)
	position = Vector2(512, 500)
	var ground = StaticBody2D.new()
	var shape = CollisionShape2D.new()
	shape.shape = RectangleShape2D.new()
	shape.shape.size = Vector2(4 * WIDTH, 100)
	ground.add_child(shape)
	ground.position = Vector2(0, 50)
	add_child(ground)


# -- what the agent asks of its parent


func begin_episode():
	if body != null:
		body.free()
	body = RigidBody2D.new()
	var shape = CollisionShape2D.new()
	shape.shape = RectangleShape2D.new()
	shape.shape.size = SIZE
	body.add_child(shape)
	body.position = Vector2(random.randf_range(-150, 150), -START)
	body.rotation = random.randf_range(-0.2, 0.2)
	body.linear_velocity = Vector2(random.randf_range(-40, 40), random.randf_range(0, 40))
	body.linear_damp = 0
	body.can_sleep = false
	body.contact_monitor = true
	body.max_contacts_reported = 4
	add_child(body)
	action = NOTHING
	frames = 0
	outcome = ""
	potential = potential_of_state()


func get_observation():
	var velocity = body.linear_velocity
	return [body.position.x / 150, height() / 150, velocity.x / 50, velocity.y / 50, body.rotation * 2, body.angular_velocity]


func set_action(chosen):
	action = chosen


# The arrow keys, or one of the players that the trained one is compared with.
func choose_action():
	if mode == "keys":
		if Input.is_action_pressed("ui_left"):
			return TURN_LEFT
		if Input.is_action_pressed("ui_right"):
			return TURN_RIGHT
		return MAIN_ENGINE if Input.is_action_pressed("ui_up") else NOTHING
	if mode == "random":
		return random.randi_range(0, 3)
	var wanted = clamp(-0.003 * body.position.x - 0.012 * body.linear_velocity.x, -0.4, 0.4)
	var error = wanted - body.rotation - 0.5 * body.angular_velocity
	if abs(error) > 0.12:
		return TURN_RIGHT if error > 0 else TURN_LEFT
	return MAIN_ENGINE if body.linear_velocity.y > clamp(0.4 * height(), 12, 90) else NOTHING


# -- the game


func _physics_process(delta):
	if body == null or outcome != "":
		return
	frames += 1
	if action == MAIN_ENGINE:
		body.apply_central_impulse(Vector2(0, -MAIN * delta).rotated(body.rotation))
	elif action != NOTHING:
		body.apply_torque_impulse((TURN if action == TURN_RIGHT else -TURN) * delta)
	var now = potential_of_state()
	agent.add_reward(now - potential - 0.01 - (0.005 if action == MAIN_ENGINE else 0.0))
	potential = now
	if body.get_colliding_bodies().size() > 0:
		var safe = speed < SAFE_SPEED and abs(body.rotation) < SAFE_ANGLE
		var on_pad = abs(body.position.x) < PAD
		finish("landed" if safe and on_pad else "landed off the pad" if safe else "crashed", 10.0 if safe and on_pad else 0.0 if safe else -10.0)
	elif abs(body.position.x) > WIDTH or height() > HEIGHT:
		finish("lost", -10.0)
	elif frames >= MAX_FRAMES:
		outcome = "out of time"
		agent.end_episode(true)
	speed = body.linear_velocity.length()
	queue_redraw()


func finish(how: String, reward: float):
	outcome = how
	agent.add_reward(reward)
	agent.end_episode()


func height() -> float:
	return -body.position.y - SIZE.y / 2


# Differences of it are the reward of a frame: nearer to the pad, slower and upright is better.
func potential_of_state() -> float:
	return -4.0 * Vector2(body.position.x, height()).length() / START - 2.0 * body.linear_velocity.length() / 100.0 - 2.0 * abs(body.rotation)


func _on_episode_ended(episode_return, decisions):
	played += 1
	print("episode %d: return %.2f, %d decisions, %s" % [played, episode_return, decisions, outcome])
	if played >= episodes:
		agent.active = false
		get_tree().quit()


func _draw():
	draw_line(Vector2(-WIDTH, 0), Vector2(WIDTH, 0), Color.GRAY, 2)
	draw_line(Vector2(-PAD, 0), Vector2(PAD, 0), Color.YELLOW, 6)
	if body == null:
		return
	draw_set_transform(body.position, body.rotation, Vector2(1, 1))
	draw_rect(Rect2(-SIZE / 2, SIZE), Color.LIGHT_BLUE)
	if action == MAIN_ENGINE:
		draw_line(Vector2(0, SIZE.y / 2), Vector2(0, SIZE.y / 2 + 14), Color.ORANGE, 6)
	elif action != NOTHING:
		var side = -SIZE.x / 2 if action == TURN_RIGHT else SIZE.x / 2
		draw_line(Vector2(side, 0), Vector2(side * 1.6, 0), Color.ORANGE, 4)
