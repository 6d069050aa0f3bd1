// A small game: balance a pole on a cart by pushing the cart left or right.
//
//     mcs -out:cartpole.exe ../Ludus.cs CartPole.cs           (or: csc, dotnet)
//     mono cartpole.exe --keys                                play with the arrow keys
//     ludus train -f examples/cartpole_http/cartpole.yaml     then: mono cartpole.exe --matches 3000
//     ludus serve RUN                                         then: mono cartpole.exe --watch --deadline 30
//
// In training the game waits for every action. Live (--deadline) it never waits longer than the deadline: a late action is replaced by
// the previous one.

using System;
using System.Globalization;
using System.Threading;
using Ludus;

sealed class CartPole
{
    const double Gravity = 9.8, CartMass = 1, PoleMass = 0.1, HalfLength = 0.5, Push = 10, FrameSeconds = 0.02;
    const int Limit = 500;

    double _x, _speed, _angle, _turning;
    public int Frames { get; private set; }
    public bool Fell { get { return Math.Abs(_x) > 2.4 || Math.Abs(_angle) > 12 * Math.PI / 180; } }
    public bool Over { get { return Fell || Frames >= Limit; } }

    public CartPole(Random random)
    {
        _x = random.NextDouble() * 0.1 - 0.05;
        _speed = random.NextDouble() * 0.1 - 0.05;
        _angle = random.NextDouble() * 0.1 - 0.05;
        _turning = random.NextDouble() * 0.1 - 0.05;
    }

    public void Step(int action)
    {
        double force = action == 1 ? Push : -Push, mass = CartMass + PoleMass;
        double sin = Math.Sin(_angle), cos = Math.Cos(_angle);
        double pull = (force + PoleMass * HalfLength * _turning * _turning * sin) / mass;
        double twist = (Gravity * sin - cos * pull) / (HalfLength * (4.0 / 3 - PoleMass * cos * cos / mass));
        double acceleration = pull - PoleMass * HalfLength * twist * cos / mass;
        _x += FrameSeconds * _speed;
        _speed += FrameSeconds * acceleration;
        _angle += FrameSeconds * _turning;
        _turning += FrameSeconds * twist;
        Frames++;
    }

    /// <summary>Observation in the raw format. The reward belongs to the previous action.</summary>
    public byte[] Seen(float reward, bool last = false)
    {
        return new RawWriter().Begin(reward, last && Fell, last && !Fell)
            .Floats((float)_x, (float)_speed, (float)_angle, (float)_turning).ToArray();
    }

    public string Drawn()
    {
        const int Columns = 61, Rows = 8;
        var rows = new char[Rows][];
        for (int i = 0; i < Rows; i++) rows[i] = new string(i == Rows - 1 ? '_' : ' ', Columns).ToCharArray();
        int cart = (int)Math.Round((_x / 2.4 + 1) / 2 * (Columns - 1));
        for (int i = 0; i < Rows - 1; i++)
        {
            int column = cart + (int)Math.Round(Math.Tan(_angle) * (Rows - 1 - i) * 2);
            if (column >= 0 && column < Columns) rows[i][column] = '|';
        }
        if (cart >= 0 && cart < Columns) rows[Rows - 1][cart] = '#';
        return string.Join("\n", Array.ConvertAll(rows, row => new string(row))) + "\n";
    }
}

static class Program
{
    static int Main(string[] arguments)
    {
        string url = "http://127.0.0.1:8000", token = null;
        int matches = 1, deadlineMs = 0, seed = 0;
        bool watch = false, keys = false;
        for (int i = 0; i < arguments.Length; i++)
        {
            string value = i + 1 < arguments.Length ? arguments[i + 1] : "";
            switch (arguments[i])
            {
                case "--url": url = value; i++; break;
                case "--token": token = value; i++; break;
                case "--matches": matches = int.Parse(value, CultureInfo.InvariantCulture); i++; break;
                case "--deadline": deadlineMs = int.Parse(value, CultureInfo.InvariantCulture); i++; break;
                case "--seed": seed = int.Parse(value, CultureInfo.InvariantCulture); i++; break;
                case "--watch": watch = true; break;
                case "--keys": keys = watch = true; break;
                default:
                    Console.Error.WriteLine("unknown: " + arguments[i]);
                    return 2;
            }
        }
        var options = new LudusOptions { Token = token };
        if (deadlineMs > 0)
        {
            options.DeadlineMs = deadlineMs;
            options.Fallback = Fallback.Repeat;
            options.Default = new byte[8];  // action 0, left: an action of this game is an Int64
        }
        try
        {
            var random = new Random(seed);
            using (var client = new LudusClient(url, options))
                for (int match = 1; match <= matches; match++)
                    Console.WriteLine("match " + match + ": " + (keys ? Keys(random) : Play(client, random, watch)));
            return 0;
        }
        catch (LudusException error)
        {
            Console.Error.WriteLine(error);
            return 1;
        }
    }

    static string Play(LudusClient client, Random random, bool watch)
    {
        var game = new CartPole(random);
        using (LudusSession session = client.Start(new LudusStart { Body = RawWriter.Start }))
        {
            while (!game.Over)
            {
                byte[] reply = session.Tick(game.Seen(game.Frames == 0 ? 0 : 1));
                game.Step((int)new RawReader(reply).Int64());
                if (watch) Show(game);
            }
            session.End(game.Seen(1, last: true));
            return game.Frames + " frames, " + session.Missed + " missed";
        }
    }

    static string Keys(Random random)
    {
        var game = new CartPole(random);
        int action = 0;
        while (!game.Over)
        {
            while (Console.KeyAvailable)
            {
                ConsoleKey key = Console.ReadKey(true).Key;
                action = key == ConsoleKey.RightArrow ? 1 : key == ConsoleKey.LeftArrow ? 0 : action;
            }
            game.Step(action);
            Show(game);
        }
        return game.Frames + " frames";
    }

    static void Show(CartPole game)
    {
        Console.Write("\x1b[H\x1b[2J" + game.Drawn());
        Thread.Sleep(20);
    }
}
