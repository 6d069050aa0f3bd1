// Does what its standard input says, one command per line, and tells what came of it: see tests/clients/driving.py.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;
using System.Text;
using Ludus;

static class Driver
{
    static LudusClient _client;
    static LudusSession _session;
    static LudusStart _about;

    static void Main()
    {
        var input = new StreamReader(Console.OpenStandardInput(), new UTF8Encoding(false));
        var output = new StreamWriter(Console.OpenStandardOutput(), new UTF8Encoding(false)) { AutoFlush = true };
        string line;
        while ((line = input.ReadLine()) != null)
        {
            var watch = Stopwatch.StartNew();
            string said;
            try
            {
                said = "= ok " + Hex(Do(new Command(line)));
            }
            catch (LudusException error)
            {
                string kind = error is LudusSessionLost ? "lost" : error is LudusRefused ? "refused"
                    : error is LudusDeadlineMissed ? "deadline" : error is LudusUnreachable ? "unreachable" : error.Error;
                said = "= " + kind + " " + Hex(Encoding.UTF8.GetBytes(error.Message)) + " status=" + error.Status + " word=" + error.Error
                    + " hint=" + Hex(Encoding.UTF8.GetBytes(error.Hint));
            }
            if (_session != null) said += " missed=" + _session.Missed + " flag=" + (_session.LastMissed ? 1 : 0);
            output.WriteLine(said + " ms=" + watch.ElapsedMilliseconds);
        }
    }

    static byte[] Do(Command command)
    {
        byte[] body = command["zeros"] != null ? new byte[int.Parse(command["zeros"])] : Unhex(command["body"]);
        bool later = command["async"] == "1";
        switch (command.Name)
        {
            case "open":
                Fallback fallback = (Fallback)Enum.Parse(typeof(Fallback), command["fallback"] ?? "error", true);
                if (_client != null) _client.Dispose();
                _client = new LudusClient(command["url"], new LudusOptions {
                    Token = command["token"],
                    TimeoutMs = int.Parse(command["timeout_ms"] ?? "10000"),
                    DeadlineMs = int.Parse(command["deadline_ms"] ?? "10000"),
                    Fallback = fallback,
                    Retries = int.Parse(command["retries"] ?? "2"),
                    MaxReplyBytes = int.Parse(command["max_reply_bytes"] ?? "67108864"),
                    Default = command["default"] == null ? null : Unhex(command["default"]),
                    CheckCertificate = command["certificate"] != null ? (sender, certificate, chain, errors) => true
                        : (System.Net.Security.RemoteCertificateValidationCallback)null,
                });
                return null;
            case "spec":
                return Encoding.UTF8.GetBytes(_client.Spec());
            case "start":
                if (command["again"] != null)
                {
                    _session = _client.Start(_about);
                    return _session.Started;
                }
                var about = _about = new LudusStart { Session = command["session"], Match = command["match"], Side = command["side"], Model = command["model"], Body = body };
                if (command["version"] != null) about.Version = long.Parse(command["version"]);
                if (command["temperature"] != null)
                    about.Temperature = double.Parse(command["temperature"], System.Globalization.CultureInfo.InvariantCulture);
                if (_session != null) _session.Dispose();
                _session = null;
                _session = later ? Wait(_client.StartAsync(about)) : _client.Start(about);
                return _session.Started;
            case "tick":
                int deadlineMs = int.Parse(command["deadline_ms"] ?? "0");
                return later ? Wait(_session.TickAsync(body, deadlineMs)) : _session.Tick(body, deadlineMs);
            case "end":
                return later ? Wait(_session.EndAsync(body)) : _session.End(body);
            case "raw":
                return Raw();
            default:
                throw new LudusException(0, "usage", "unknown command " + command.Name);
        }
    }

    static T Wait<T>(System.Threading.Tasks.Task<T> task)
    {
        return task.GetAwaiter().GetResult();
    }

    // Written, sent to an actor that echoes it, and read again.
    static byte[] Raw()
    {
        var sent = new RawWriter().Begin(-1.5f, truncated: true, mask: new[] { true, false, true })
            .Floats(0.25f, -3f).Int64(-2).Byte(200).Int32(7).Double(0.1).Bytes(new byte[] { 1, 2 }).ToArray();
        var got = new RawReader(_session.Tick(sent));
        if (got.Float() != -1.5f || got.Int32() != 6) throw new LudusException(0, "raw", "reward, flags");
        float[] floats = got.Floats(2);
        if (floats[0] != 0.25f || floats[1] != -3f || got.Int64s(1)[0] != -2 || got.Byte() != 200 || got.Int32() != 7
            || got.Double() != 0.1 || got.Left != 5)
            throw new LudusException(0, "raw", "values");
        try
        {
            got.Int64();
        }
        catch (LudusException)
        {
            return sent;
        }
        throw new LudusException(0, "raw", "It read more than there was.");
    }

    static string Hex(byte[] data)
    {
        var text = new StringBuilder("x");
        foreach (byte value in data ?? new byte[0]) text.Append(value.ToString("x2"));
        return text.ToString();
    }

    static byte[] Unhex(string text)
    {
        if (text == null) return null;
        var data = new byte[text.Length / 2];
        for (int i = 0; i < data.Length; i++) data[i] = Convert.ToByte(text.Substring(2 * i, 2), 16);
        return data;
    }

    sealed class Command
    {
        public readonly string Name;
        readonly Dictionary<string, string> _values = new Dictionary<string, string>();

        public Command(string line)
        {
            string[] words = line.Split(' ');
            Name = words[0];
            for (int i = 1; i < words.Length; i++)
            {
                int sign = words[i].IndexOf('=');
                _values[words[i].Substring(0, sign)] = words[i].Substring(sign + 1);
            }
        }

        public string this[string key]
        {
            get
            {
                string value;
                return _values.TryGetValue(key, out value) ? value : null;
            }
        }
    }
}
