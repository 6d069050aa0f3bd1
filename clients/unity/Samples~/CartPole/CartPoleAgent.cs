using UnityEngine;
using Ludus;

/// <summary>
/// A pole on a cart that is pushed left or right. Add it to an object with a child, the pole; `ludus train -f
/// examples/cartpole_http/cartpole.yaml` trains it. decisionPeriod is 1, and waitForActions is on for training.
/// </summary>
public sealed class CartPoleAgent : LudusAgent
{
    const float Gravity = 9.8f, CartMass = 1, PoleMass = 0.1f, HalfLength = 0.5f, Push = 10, StepSeconds = 0.02f;
    const int LongestEpisode = 500;

    public Transform pole;
    public int seed;

    System.Random _random;
    float _x, _speed, _angle, _turning;
    int _frames;

    public int Matches { get; private set; }

    protected override void OnEpisodeBegin()
    {
        _random = _random ?? new System.Random(seed);
        _x = NearZero();
        _speed = NearZero();
        _angle = NearZero();
        _turning = NearZero();
        _frames = 0;
    }

    protected override void Observe(RawWriter observation)
    {
        observation.Floats(_x, _speed, _angle, _turning);
    }

    protected override void Act(RawReader action)
    {
        Step(action.Int64() == 1 ? Push : -Push);
        AddReward(1);
        if (pole != null)
        {
            transform.localPosition = new Vector3(_x, 0, 0);
            pole.localRotation = Quaternion.Euler(0, 0, -_angle * Mathf.Rad2Deg);
        }
        bool fell = Mathf.Abs(_x) > 2.4f || Mathf.Abs(_angle) > 12 * Mathf.Deg2Rad;
        if (!fell && _frames < LongestEpisode) return;
        Matches++;
        Debug.Log("match " + Matches + ": " + _frames + " frames, " + Missed + " missed");
        if (fell) EndEpisode();
        else InterruptEpisode();
    }

    void Step(float force)
    {
        float sin = Mathf.Sin(_angle), cos = Mathf.Cos(_angle), mass = CartMass + PoleMass, moment = PoleMass * HalfLength;
        float pressed = (force + moment * _turning * _turning * sin) / mass;
        float turned = (Gravity * sin - cos * pressed) / (HalfLength * (4f / 3 - PoleMass * cos * cos / mass));
        float pushed = pressed - moment * turned * cos / mass;
        _x += StepSeconds * _speed;
        _speed += StepSeconds * pushed;
        _angle += StepSeconds * _turning;
        _turning += StepSeconds * turned;
        _frames++;
    }

    float NearZero() { return (float)_random.NextDouble() * 0.1f - 0.05f; }
}
